# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Listings on pages are complete, and outputs are what the commands print."""

import re
import shlex

import pytest

from palm_mtf.cli.main import main
from tests.source_files import ROOT

PLAN = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
TWO_PODS = "palm_mtf plan --gin_file=recipes/palm_540b_two_pods.gin"

STEPS = (
  "palm_mtf plan --steps --gin_file=recipes/quickstart.gin --gin.STAGES=2 "
  "--gin.NUM_PODS=1 --gin.NUM_MICROBATCHES=4"
)


def _shown_after(page: str, command: str) -> str:
  """Returns the first block of output after a command of a page."""
  line = f"\n{command}\n"
  assert line in page, command
  rest = page.partition(line)[2].partition("```")[2]
  return re.search(r"^```\n(.*?)^```$", rest, re.M | re.S)[1]


@pytest.mark.parametrize(
  "command",
  [
    TWO_PODS,
    f"{TWO_PODS} --search",
    STEPS,
  ],
)
def test_the_output_shown_is_what_the_command_prints(
  command, tmp_path, monkeypatch, capsys
):
  """A line " ..." on a page stands for any number of lines."""
  monkeypatch.chdir(tmp_path)
  assert main(shlex.split(command)[1:]) == 0
  printed = capsys.readouterr().out
  parts = re.split(r"^ \.\.\.\n", _shown_after(PLAN, command), flags=re.M)
  pattern = ".*".join(map(re.escape, parts))
  # plan.md leaves out the tables of parameters and FLOPs, which come first.
  assert re.search(f"{pattern}$", printed, re.S), printed
