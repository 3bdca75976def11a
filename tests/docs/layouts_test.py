# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import ast
import re

import pytest

from palm_mtf.cli.main import main
from tests import processes, runs
from tests.doc_pages import Page
from tests.source_files import ROOT

PAGE = Page("docs/layouts.md")


@pytest.mark.slow
@PAGE.shows("palm_mtf train --gin_file=recipes/quickstart.gin")
def test_a_layout_changes_no_result(block, corpus, finished, tmp_path):
  (command,) = block.commands
  settings = {**runs.SETTINGS, "TEXT_FILES": f"{corpus}/*.txt"}
  sizes = [f"--gin.{name}={value!r}" for name, value in settings.items()]
  done = processes.python("-m", *command, *sizes, cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  losses = [
    [x["loss"] for x in runs.read_metrics(model_dir) if "loss" in x]
    for model_dir in (finished, tmp_path / "runs" / "split")
  ]
  assert len(losses[0]) == 6
  assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_every_layout_of_the_table_is_a_file_that_splits_what_it_says(capsys):
  rows = re.findall(r"^\| `(\w+\.gin)` \| (.*?) \|", PAGE.text, re.M)
  files = {x.name for x in (ROOT / "gin" / "layouts").glob("*.gin")}
  assert {name for name, _ in rows} == {
    x for x in files if not x.startswith("tpu_")
  }
  for name, said in rows:
    flags = [f"--gin_file=layouts/{name}", "--gin.MODEL_DIR='x'"]
    recipe = "--gin_file=recipes/quickstart.gin"
    assert main(["train", recipe, *flags, "--print_config"]) == 0
    printed = capsys.readouterr().out
    layout = ast.literal_eval(
      re.search(r"^LAYOUT = (.*?) +#", printed, re.M)[1]
    )
    splits = re.split(r"[,\s]+", layout)
    for rule in ",".join(re.findall(r"`([\w:,]+:[\w:,]+)`", said)).split(","):
      assert not rule or rule in splits


MEASURED = [
  "MB                  all_reduce",
  "mesh               devices",
]


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested(*MEASURED)
