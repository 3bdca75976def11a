# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""tests/tools/ has the tables; docs_test.py has the flags."""

from tests.doc_pages import Page
from tools import validate_plan

PAGE = Page("docs/predictions.md")


@PAGE.shows("palm_mtf plan --calibrate")
def test_the_case_that_the_page_names_is_one(block):
  calibrate, every, one = block.commands
  assert calibrate[1:] == ["plan", "--calibrate"]
  assert every == one[: len(every)]
  _, case = one[len(every) :]
  assert case in validate_plan.CASES


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested(
    ".venv/bin/python -m tools.papers_plan --write"
  )
