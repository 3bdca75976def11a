# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/models.md are those of the files and of their plans."""

import re

from palm_mtf.cli.gin_folder import gin_folder
from palm_mtf.cli.main import main
from tests.accounting.published_sizes import count_all, preset
from tests.doc_pages import Page
from tests.presets_test import FITTING, TINY
from tests.unitransformer.encoder_decoder_test import T5

PAGE = Page("docs/models.md")
# {file: other cells} of each table.
MODELS, LAYOUTS, SMALL = (
  {
    name.strip("`"): cells
    for line in table.splitlines()[2:]
    for name, *cells in [[x.strip() for x in line.strip("|").split("|")]]
  }
  for table in re.findall(r"(?:^\|.*\n)+", PAGE.text, re.M)
)
SMALL_FILES = {*TINY, "palm_tiny"}


def test_every_file_is_listed_with_its_parameters():
  files = {x.stem for x in gin_folder().glob("models/*.gin")}
  assert MODELS.keys() == files - SMALL_FILES - {"t5_tiny"}
  assert SMALL.keys() == SMALL_FILES
  counts = {name: cells[1] for name, cells in MODELS.items()}
  counts |= {name: cells[0] for name, cells in SMALL.items()}
  for name, count in counts.items():
    found = T5[name][0] if name in T5 else count_all(preset(name))
    assert count == f"{found:,}", name


def test_the_layouts_are_those_whose_plans_are_tested():
  assert LAYOUTS.keys() == FITTING.keys()
  for name, (layout, changes) in FITTING.items():
    shown = [f"`{macro} = {value}`" for macro, value in changes.items()]
    assert LAYOUTS[name] == [f"`{layout}`", ", ".join(shown)], name


@PAGE.shows("palm_mtf plan --gin_file=models/llama_7b.gin")
def test_plans_end_as_shown(block, capsys):
  last = []
  for command in block.commands:
    assert main(command[1:]) == 0
    last.append(capsys.readouterr().out.splitlines()[-1])
  assert "\n".join([*last, ""]) == PAGE.blocks[2].text


@PAGE.shows("$ palm_mtf plan")
def test_the_error_shown_is_the_error_given(block, capsys):
  ((command, output),) = block.runs
  assert main(command[1:]) == 2
  assert capsys.readouterr() == ("", output)


@PAGE.shows("palm_mtf plan --search")
def test_a_search_finds_layouts(block, capsys):
  (command,) = block.commands
  assert main(command[1:]) == 0
  assert "candidates fit into memory" in capsys.readouterr().out


# docs_test.py and presets_test.py have the first block, and a test above the
# output of plans.
COMPARED = ["palm_mtf train --gin_file=recipes/quickstart.gin", "fits: "]


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested(*COMPARED)
