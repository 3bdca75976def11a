# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts to score, from the command line or a file.

a file, --text        a document: how likely is it
FILE.tsv              a line: inputs, a tab, targets; or several targets, with
                      tabs between them: options
FILE.jsonl            a line: {"text": ...}, {"inputs": ..., "targets": ...}
                      or {"inputs": ..., "options": [...]}
"""

import dataclasses
import json
import os
from collections.abc import Sequence

from palm_mtf.errors import UserError
from palm_mtf.inference.prompts import read_input, split_lines

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
    path: path of a .jsonl or .tsv file, or else of a document.

  Raises:
    UserError: the file cannot be read, is empty, or a line is no item.
  """
  what = f"--input = {path!r}"
  content = read_input(path, "there has to be a text to score")
  reader = {".jsonl": _json_item, ".tsv": _tsv_item}.get(
    os.path.splitext(path)[1]
  )
  if reader is None:
    return [ScoreItem(path, "", (content,), "text")]
  # A newline or a tab in a text takes JSON.
  return [
    reader(line, f"{what}: line {n}", f"{path}:{n}")
    for n, line in enumerate(split_lines(content), 1)
  ]


def _tsv_item(line: str, what: str, origin: str) -> ScoreItem:
  inputs, *targets = line.split("\t")
  if not targets:
    raise UserError(
      f"{what} has no tab; write inputs, a tab and targets, or options with "
      "tabs between them."
    )
  return _example(inputs, targets, len(targets) > 1, what, origin)


def _json_item(line: str, what: str, origin: str) -> ScoreItem:
  try:
    fields = json.loads(line)
  except (ValueError, RecursionError):
    fields = None
  if not isinstance(fields, dict):
    raise UserError(f"{what} is no JSON object; {_FORMS}.")
  named = {"text", "inputs", "targets", "options"} & set(fields)
  if named == {"text"}:
    if not isinstance(fields["text"], str) or not fields["text"]:
      raise UserError(f'{what}: "text" is no text, or empty; {_FORMS}.')
    return ScoreItem(origin, "", (fields["text"],), "text")
  if named == {"inputs", "targets"}:
    targets = [fields["targets"]]
  elif named == {"inputs", "options"}:
    targets = fields["options"]
  else:
    raise UserError(f"{what} has the fields {sorted(fields)}; {_FORMS}.")
  texts = [fields["inputs"], *targets] if isinstance(targets, list) else [None]
  if not all(isinstance(text, str) for text in texts):
    raise UserError(f"{what}: a field is no text; {_FORMS}.")
  return _example(texts[0], texts[1:], "options" in named, what, origin)


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
