# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The Python files of the project and their syntax trees, for tests."""

import ast
import functools
import gc
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def python_files(*folders: str) -> list[str]:
  return sorted(
    str(path.relative_to(ROOT))
    for folder in folders
    for path in (ROOT / folder).rglob("*.py")
  )


PACKAGE = python_files("palm_mtf")


EVERY = [*python_files("palm_mtf", "tasks", "tests", "tools"), "setup.py"]


def assert_none(breaches: Iterable[str]) -> None:
  """Fails with every breach of a rule; each breach begins with its file.

  One test per file and rule would cost a minute in pytest itself.
  """
  found = list(breaches)
  assert not found, "\n".join(found)


@functools.cache
def text_of(path: str) -> str:
  return (ROOT / path).read_text(encoding="utf-8")


def nodes_of(path: str) -> tuple[ast.AST, ...]:
  """Returns every node of a file's tree: the module itself is the first."""
  return nodes_of_text(text_of(path))


@functools.cache
def nodes_of_text(text: str) -> tuple[ast.AST, ...]:
  """Returns every node of a Python text's tree, as `nodes_of` does."""
  gc.disable()  # it would take two thirds of the time
  try:
    return tuple(ast.walk(ast.parse(text)))
  finally:
    gc.enable()
