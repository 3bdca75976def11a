# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Exemplars of a file of EXEMPLAR_FILES, the same before each question.

FILE.jsonl  a line: {"inputs": ..., "targets": ...}, and "group" if questions of
            this group alone have the exemplar
any other   a text that is used to the letter, the end of its last line too,
            but for a byte order mark at its beginning

user_text.py says how files are read.
"""

import logging
from collections.abc import Mapping

from palm_mtf.errors import UserError
from palm_mtf.evaluation.exemplars import SEPARATOR, Exemplars, ended
from palm_mtf.user_text import (
  check_text,
  format_of,
  read_json_lines,
  read_text,
)

_logger = logging.getLogger(__name__)

_MACRO = "EXEMPLAR_FILES"
_FORM = 'give {"inputs": "...", "targets": "..."}, and "group" if there are any'


def read_exemplars(path: str, num_shots: int | None) -> Exemplars:
  """Returns the exemplars of a file.

  Args:
    path: path of a file of JSON lines (.jsonl), or of a text.
    num_shots: number of JSON lines before each question, the first of its
      group; None for all. A text is used as a whole.

  Raises:
    UserError: the file cannot be read, or a line is no exemplar.
  """
  what, needed = f"{_MACRO} = {path!r}", "write the exemplars"
  if format_of(path) != ".jsonl":
    return _Text(read_text(path, what, needed), path)
  lines = read_json_lines(path, what, _FORM, needed=needed)
  exemplars = [_exemplar(fields, where) for _, where, fields in lines]
  return _Lines(exemplars, path, num_shots)


class _Text:
  """A text that stands before each question."""

  def __init__(self, text: str, path: str):
    self.text = text
    if not text.endswith(SEPARATOR if SEPARATOR in text else "\n"):
      _logger.warning(
        f"{_MACRO}: {path} does not end in an empty line, and the question "
        "follows its last character: end it as your protocol does"
      )

  def choose(self, key: str, group: str) -> list[str]:
    """Returns none: the text is all that stands before a question."""
    del key, group
    return []


class _Lines:
  """Exemplars of JSON lines: (group or None, text)."""

  text = ""

  def __init__(
    self,
    exemplars: list[tuple[str | None, str]],
    path: str,
    num_shots: int | None,
  ):
    self._exemplars, self._path = exemplars, path
    self._num_shots = num_shots

  def choose(self, key: str, group: str) -> list[str]:
    """Returns the exemplars of a question, by its group."""
    del key
    found = [text for of, text in self._exemplars if of in (None, group)]
    where = f" of group {group!r}" if group else ""
    if not found:
      raise UserError(
        f"{_MACRO}: {self._path} has no exemplar{where}; write some."
      )
    if len(found) < (self._num_shots or 0):
      raise UserError(
        f"{_MACRO}: NUM_SHOTS = {self._num_shots}, but {self._path} has only "
        f"{len(found)} exemplars{where}; give a smaller number."
      )
    return found[: self._num_shots]


def _exemplar(
  fields: Mapping[str, object], where: str
) -> tuple[str | None, str]:
  """Returns the group and the text of a line."""
  if not {"inputs", "targets"} <= {*fields} <= {"inputs", "targets", "group"}:
    raise UserError(f"{where} has the fields {sorted(fields)}; {_FORM}.")
  for name, text in fields.items():
    if not check_text(text, f"{where}: {name!r}", _FORM):
      raise UserError(f"{where}: {name!r} is empty; {_FORM}.")
  inputs, targets = fields["inputs"], fields["targets"]
  return fields.get("group"), ended(inputs, targets) + targets
