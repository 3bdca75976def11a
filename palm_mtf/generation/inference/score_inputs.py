# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts to score, from the command line or a file.

a file, --text        a document: how likely is it
FILE.tsv              a line: inputs, a tab, targets; or several targets, with
                      tabs between them: options
FILE.jsonl            a line: {"text": ...}, {"inputs": ..., "targets": ...}
                      or {"inputs": ..., "options": [...]}

user_text.py says how files are read. A document is scored byte for byte, as
TEXT_FILES trains it: a byte order mark at its beginning is part of it.
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
  """Text to score: a document, targets given inputs, or options."""

  origin: str  # file and line, for messages
  inputs: str  # "" of a document
  targets: tuple[str, ...]  # one, or the options
  kind: str  # "text", "targets" or "options"


def given_texts(texts: Sequence[str]) -> list[ScoreItem]:
  """Returns the documents of --text; raises UserError where one is empty."""
  if not all(texts):
    raise UserError("--text = '': is empty; there has to be a text to score.")
  return [
    ScoreItem(f"--text {number}", "", (text,), "text")
    for number, text in enumerate(texts, 1)
  ]


def read_items(path: str) -> list[ScoreItem]:
  """Returns the items of a file.

  Args:
    path: path of a .jsonl or .tsv file, or else of a document; "-" is stdin.

  Raises:
    UserError: the file cannot be read, is empty, or a line is no item.
  """
  what, needed = f"--input = {path!r}", "there has to be a text to score"
  # A newline or a tab in a text takes JSON.
  if format_of(path) == ".jsonl":
    lines = read_json_lines(path, what, _FORMS, needed=needed)
    return [_json_item(line, at, f"{path}:{n}") for n, at, line in lines]
  if format_of(path) == ".tsv":
    lines = read_lines(path, what, needed)
    return [_tsv_item(line, at, f"{path}:{n}") for n, at, line in lines]
  document = read_text(path, what, needed, keeps_mark=True)
  return [ScoreItem(path, "", (document,), "text")]


def _tsv_item(line: str, what: str, origin: str) -> ScoreItem:
  inputs, *targets = line.split("\t")
  if not targets:
    raise UserError(
      f"{what} has no tab; write inputs, a tab and targets, or options with "
      "tabs between them."
    )
  return _example(inputs, targets, len(targets) > 1, what, origin)


def _json_item(
  fields: Mapping[str, object], what: str, origin: str
) -> ScoreItem:
  named = {"text", "inputs", "targets", "options"} & set(fields)
  if named not in ({"text"}, {"inputs", "targets"}, {"inputs", "options"}):
    raise UserError(f"{what} has the fields {sorted(fields)}; {_FORMS}.")
  if "options" in named and not isinstance(fields["options"], list):
    raise UserError(f"{what}: 'options' is no list of texts; {_FORMS}.")
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
  return _example(fields["inputs"], targets, has_options, what, origin)


def _example(
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
