# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs, table and law of the page, of the losses that it shows.

tests/commands/sweep_test.py trains sweeps.
"""

import re

import pytest

from palm_mtf.cli import gin_files
from palm_mtf.cli.gin_files import make_run_loader
from palm_mtf.model_dir.paths import SweepDir
from palm_mtf.sweep.runs import make_runs, table_text
from palm_mtf.sweep.scaling_law import law_record, law_text
from tests.doc_pages import Page

PAGE = Page("docs/sweep.md")
SWEEP = "palm_mtf sweep --gin_file=sweeps/quickstart_sizes.gin"


def runs_of_command(words):
  """Returns settings and runs of a command, as the command itself has them."""
  files = [x.removeprefix("--gin_file=") for x in words if "_file=" in x]
  bindings = [x.removeprefix("--gin.") for x in words if x[:6] == "--gin."]
  configuration = gin_files.load("sweep", files, bindings)
  model_dir, config = configuration.build()
  load = make_run_loader(files, bindings)
  return config, make_runs(config.sweep, config, SweepDir(model_dir), load)


@pytest.fixture(scope="module")
def rows():
  """The table of the page: what is computed, and the losses that are shown."""
  (block,) = [x for x in PAGE.blocks if x.text.startswith("run  ")]
  shown = [line.split() for line in block.text.splitlines()[1:]]
  command = f'{SWEEP} --gin.MODEL_DIR="runs/sizes"'.split()
  _, runs = runs_of_command(command)
  assert [run.name for run in runs] == [line[0] for line in shown]
  return [
    {
      "run": run.name,
      "parameters": run.num_parameters,
      "tokens": run.num_tokens,
      "flops": run.num_tokens * run.flops_per_token,
      "flops_per_token": run.flops_per_token,
      "secs": float(line[4]),
      "loss": float(line[5]),
      "best_loss": float(line[6]),
      "outcome": "finished",
      "held_out": run.is_held_out,
    }
    for run, line in zip(runs, shown, strict=True)
  ]


@PAGE.shows(
  f"{SWEEP} \\\n  --gin.MODEL_DIR='\"runs/sizes\"'\n",
  f"{SWEEP} \\\n  --gin.MODEL_DIR='\"runs/sizes\"' --gin.SWEEP_BUDGET",
)
def test_the_command_has_24_runs_and_the_budget_that_is_shown(block):
  (words,) = block.commands
  config, runs = runs_of_command(words[2:])
  assert len(runs) == 24
  budget = 1e15 if "BUDGET" in block.text else 1e14
  assert config.sweep.sweep_budget_flops == budget


@PAGE.shows("# rates.gin")
def test_the_file_of_two_axes_has_the_runs_that_the_page_names(
  block, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "rates.gin").write_text(block.text)
  _, runs = runs_of_command(["--gin_file=rates.gin", "--gin.MODEL_DIR='x'"])
  named = re.search(r"trains `(.*)`, `(.*)`, `(.*)` and `(.*)`", PAGE.text)
  assert tuple(run.name for run in runs) == named.groups()


@PAGE.shows("run  ")
def test_the_table_has_the_sizes_tokens_and_flops_of_its_runs(block, rows):
  assert table_text(rows) == block.text.rstrip("\n")


def words_and_numbers(text):
  words, numbers = [], []
  for word in text.replace(",", "").split():
    try:
      numbers.append(float(word.rstrip("%")))
    except ValueError:
      words.append(word)
  return words, numbers


@pytest.mark.slow
@PAGE.shows("scaling law of 20 runs")
def test_the_law_is_that_of_the_losses_of_the_table(block, rows):
  words, numbers = words_and_numbers(law_text(law_record(rows, 1e14)))
  shown_words, shown = words_and_numbers(block.text)
  assert words == shown_words
  # The page has losses of four decimals, and the law is of whole ones, which
  # moves the third digit of some coefficients.
  assert numbers == pytest.approx(shown, rel=0.011)


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested()
