# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks that a test runs each block of code that a page shows.

tests/docs/NAME_test.py tests docs/NAME.md. Every block of the page belongs to
one test function, which gets the block as `block` and runs it:

  PAGE = Page("docs/training.md")

  @PAGE.shows("palm_mtf report runs/quickstart")  # the block's first line
  def test_a_report_is_a_file(block, tmp_path):
    for arguments in block.commands:
      assert main(arguments[1:]) == 0

  def test_every_block_is_tested():
    PAGE.assert_every_block_is_tested()
"""

import dataclasses
import re
import shlex

import pytest

from tests.source_files import ROOT


@dataclasses.dataclass(frozen=True)
class Block:
  """A fenced block: its language ("" for none) and its text."""

  language: str
  text: str

  @property
  def commands(self) -> list[list[str]]:
    """The words of each shell command, as the shell splits them.

    A line that begins with "$ " is a command, and the lines after it are its
    output; without such a line, every line is a command.
    """
    return [words for words, _ in self.runs]

  @property
  def runs(self) -> list[tuple[list[str], str]]:
    """The words and the output of each shell command."""
    lines = self.text.replace("\\\n", " ").splitlines()
    shows_output = any(line.startswith("$ ") for line in lines)
    found: list[tuple[list[str], str]] = []
    for line in lines:
      if not shows_output or line.startswith("$ "):
        words = shlex.split(line.removeprefix("$ "), comments=True)
        found += [(words, "")] if words else []
      else:
        words, output = found[-1]
        found[-1] = words, output + line + "\n"
    return found


def blocks_of(text: str) -> list[Block]:
  """Returns the fenced blocks of a page, in their order."""
  found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
  return [Block(language, content) for language, content in found]


class Page:
  """One page, and which of its blocks are tested."""

  def __init__(self, path: str):
    """Reads the page; `path` is below the root of the project."""
    self.text = (ROOT / path).read_text(encoding="utf-8")
    self.blocks = blocks_of(self.text)
    self._tested: set[Block] = set()

  def shows(self, *beginnings: str) -> pytest.MarkDecorator:
    """Calls the test with each block that begins so, as argument `block`."""
    found = [self._block(beginning) for beginning in beginnings]
    self._tested.update(found)
    return pytest.mark.parametrize("block", found, ids=beginnings)

  def _block(self, beginning: str) -> Block:
    found = [block for block in self.blocks if block.text.startswith(beginning)]
    assert len(found) == 1, f"{len(found)} blocks begin with {beginning!r}"
    return found[0]

  def assert_every_block_is_tested(self, *measured: str) -> None:
    """Fails with the blocks that no test gets by `shows`.

    Args:
      measured: first lines of blocks that no test can reproduce, because they
        show times and sizes that a tool measured.
    """
    tested = self._tested | {self._block(beginning) for beginning in measured}
    missing = [x.text for x in self.blocks if x not in tested]
    assert not missing, "no test makes:\n" + "\n".join(missing)
