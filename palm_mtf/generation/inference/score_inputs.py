# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads texts to score, from the command line or a file.

--text, other files   a document
FILE.tsv              per line: inputs, a tab, and targets; or several targets
                      (options), separated by tabs
FILE.jsonl            per line: {"text": ...}, {"inputs": ..., "targets": ...}
                      or {"inputs": ..., "options": [...]}

A document is scored byte for byte, as TEXT_FILES trains it, including a byte
order mark at its beginning.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from palm_mtf.errors import UserError
from palm_mtf.user_text import (
  check_text,
  format_of,
  read_json_lines,
  read_lines,
  read_text,
)

_FORMS = (
  'give {"text": "..."}, {"inputs": "...", "targets": "..."} or {"inputs": '
  '"...", "options": ["...", "..."]}'
)


@dataclasses.dataclass(frozen=True)
class ScoreItem:
  """A document to score; or inputs, and the targets or options to score."""

  origin: str  # file and line, for messages
  inputs: str  # "" for a document
  targets: tuple[str, ...]  # one text, or the options
  kind: str  # "text", "targets" or "options"


def make_text_items(texts: Sequence[str]) -> list[ScoreItem]:
  """Makes items from --text flags; raises UserError if a text is empty."""
  if not all(texts):
    raise UserError("--text = '': is empty; there has to be a text to score.")
  return [
    ScoreItem(f"--text {number}", "", (text,), "text")
    for number, text in enumerate(texts, 1)
  ]


def read_items(path: str) -> list[ScoreItem]:
  """Returns the items of a file.

  Args:
    path: .jsonl or .tsv file, otherwise a document; "-" is stdin.

  Raises:
    UserError: if the file cannot be read, is empty, or a line is not an item.
  """
  what, needed = f"--input = {path!r}", "there has to be a text to score"
  # Inputs and targets can have newlines or tabs only in JSON.
  if format_of(path) == ".jsonl":
    lines = read_json_lines(path, what, _FORMS, needed=needed)
    return [_read_json_item(line, at, f"{path}:{n}") for n, at, line in lines]
  if format_of(path) == ".tsv":
    lines = read_lines(path, what, needed)
    return [_read_tsv_item(line, at, f"{path}:{n}") for n, at, line in lines]
  document = read_text(path, what, needed, keeps_mark=True)
  return [ScoreItem(path, "", (document,), "text")]


def _read_tsv_item(line: str, what: str, origin: str) -> ScoreItem:
  inputs, *targets = line.split("\t")
  if not targets:
    raise UserError(
      f"{what} has no tab; write inputs, a tab and targets, or options with "
      "tabs between them."
    )
  return _make_item(inputs, targets, len(targets) > 1, what, origin)


def _read_json_item(
  fields: Mapping[str, object], what: str, origin: str
) -> ScoreItem:
  named = {"text", "inputs", "targets", "options"} & set(fields)
  if named not in ({"text"}, {"inputs", "targets"}, {"inputs", "options"}):
    raise UserError(f"{what} has the fields {sorted(fields)}; {_FORMS}.")
  if "options" in named and not isinstance(fields["options"], list):
    raise UserError(f"{what}: 'options' is not a list of texts; {_FORMS}.")
  for name in sorted(named):
    value = fields[name]
    for text in value if name == "options" else [value]:
      check_text(text, f"{what}: {name!r}", _FORMS)
  if named == {"text"}:
    if not fields["text"]:
      raise UserError(f"{what}: 'text' is empty; {_FORMS}.")
    return ScoreItem(origin, "", (fields["text"],), "text")
  has_options = "options" in named
  targets = fields["options"] if has_options else [fields["targets"]]
  return _make_item(fields["inputs"], targets, has_options, what, origin)


def _make_item(
  inputs: str,
  targets: Sequence[str],
  has_options: bool,
  what: str,
  origin: str,
) -> ScoreItem:
  if not inputs:
    raise UserError(
      f'{what}: inputs are empty; give some, or the targets as {{"text": ...}} '
      "of a JSON line."
    )
  if not targets or not all(targets):
    raise UserError(
      f"{what}: targets are empty; there has to be a text to score."
    )
  kind = "options" if has_options else "targets"
  return ScoreItem(origin, inputs, tuple(targets), kind)
