# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads docs/internals.md: functions of a step, and diffs of recipes."""

import re
from collections.abc import Iterator
from pathlib import Path


def read_spine(text: str) -> list[tuple[list[str], list[str]]]:
  """Returns the functions of each line, and those of the line that calls it.

  A function is "cli/main.py: main".
  """
  above: list[list[str]] = [[]]
  found = []
  for line in text.splitlines():
    file, _, names = line.strip().partition(": ")
    functions = [f"{file}: {name}" for name in names.split(", ")]
    depth = (len(line) - len(line.lstrip())) // 2
    del above[depth + 1 :]
    found.append((functions, above[depth]))
    above.append(functions)
  return found


def apply_diff(text: str, root: Path) -> Iterator[tuple[str, str]]:
  """Yields each file's path and new text; fails unless a place is found once.

  A hunk begins with only "@@": its lines, not their numbers, tell its place.
  """
  for part in re.split(r"^(?=--- )", text, flags=re.M)[1:]:
    header, *hunks = re.split(r"^@@\n", part, flags=re.M)
    old, new = re.fullmatch(r"--- (.+)\n\+\+\+ (.+)\n", header).groups()
    path, is_new = root / new, old == "/dev/null"
    assert (is_new or old == new) and path.exists() != is_new, new
    content = "" if is_new else path.read_text("utf-8")
    for hunk in hunks:
      lines = hunk.splitlines(keepends=True)
      assert all(line[0] in " +-" for line in lines), hunk
      before = "".join(line[1:] for line in lines if line[0] in " -")
      after = "".join(line[1:] for line in lines if line[0] in " +")
      # "\n", so that a place begins with a whole line.
      count = is_new or f"\n{content}".count(f"\n{before}")
      assert count == 1, f"{new} has {count} times:\n{before}"
      content = content.replace(before, after) if before else after
    yield new, content


def change_files(text: str, root: Path) -> None:
  """Writes the files of `apply_diff`."""
  for name, content in apply_diff(text, root):
    (root / name).write_text(content, "utf-8")
