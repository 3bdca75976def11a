# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What tests/pages_test.py does not compare."""

import json

import pytest

from palm_mtf.cli.main import main
from tests.doc_pages import Page

PAGE = Page("docs/plan.md")


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
  """Runs a command in an empty folder; returns what it prints."""
  monkeypatch.chdir(tmp_path)

  def run(command):
    assert main(command[1:]) == 0
    return capsys.readouterr().out

  return run


@PAGE.shows("palm_mtf plan --gin_file=recipes/palm_540b_two_pods.gin\n")
def test_json_has_the_numbers_as_one_object(block, printed):
  _, command = block.commands  # pages_test.py has the first one
  assert json.loads(printed(command))


@PAGE.shows("palm_mtf plan --gin_file=recipes/palm_62b_two_pods.gin")
def test_a_price_of_the_users_makes_a_cost(block, printed):
  (command,) = block.commands
  with_price = printed(command)
  assert "cost" in with_price
  assert "cost" not in printed([x for x in command if "COST" not in x])


@PAGE.shows("palm_mtf plan --gin_file=recipes/palm_540b_two_pods.gin --gin.")
def test_chips_that_fail_have_the_rows_of_the_page(block, printed):
  (command,) = block.commands
  assert PAGE.blocks[PAGE.blocks.index(block) + 1].text in printed(command)


# By pages_test.py, commands/plan_test.py, and run_test.py and
# described_gpus_test.py of compilation/.
COMPARED = [
  "  goodput, if chips fail",  # above
  "palm_mtf plan --gin_file=recipes/palm_540b_two_pods.gin --search",
  "palm_mtf plan --calibrate",
  "palm_mtf plan --steps",
  "nodes",
  "pip install 'palm_mtf[compile]'",
  "compiled for v4-12x16x16",
  "pip install 'palm_mtf[compile_gpu]'",
  "compiled for 64 h100_sxm",
  "memory per device",
  "layouts of 6,144 devices",
]


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested(*COMPARED)
