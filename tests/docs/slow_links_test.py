# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import json
import re

from tests.doc_pages import Page
from tools.bench import command as bench

PAGE = Page("docs/slow_links.md")
RESTARTED = ".venv/bin/python -m tools.bench goodput --kinds restarted"


def _rows(block):
  """Returns the goodput of each row, by kind, chips and learners."""
  rows = {}
  for line in block.text.splitlines()[1:]:
    learners, kind, chips, *rest = line.split()
    percent = re.findall(r"([\d.]+)%", " ".join(rest))[0]
    rows[kind, chips, int(learners)] = float(percent)
  return rows


@PAGE.shows(RESTARTED)
def test_the_rows_of_restarts_are_what_the_command_prints(
  block, monkeypatch, capsys
):
  (command,) = block.commands
  monkeypatch.setattr("sys.argv", [*command[2:], "--json"])
  assert bench.main() == 0
  records = map(json.loads, capsys.readouterr().out.splitlines())
  shown = _rows(PAGE.blocks[PAGE.blocks.index(block) + 1])
  assert shown == {
    (x["kind"], f"{x['chips']:,}", x["learners"]): round(100 * x["goodput"], 1)
    for x in records
  }


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested(
    # Tables; the first row of each is the head of tools/bench/cases/goodput.py,
    # whose test compares the numbers with the published ones.
    *(x.text for x in PAGE.blocks if x.text.startswith("learners"))
  )
