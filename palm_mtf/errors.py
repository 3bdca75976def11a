# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The exceptions that the command line expects, and checks of settings.

The message of a `UserError` says in one line what was given, the rule that is
broken and the fix. The command line prints the message without a traceback and
exits with 2. `StoppedError` ends a command that a signal stopped. Every other
exception is a bug of palm_mtf and exits with 1.
"""

import difflib
import importlib.util
import os
import reprlib
import signal
from collections.abc import Iterable


class UserError(ValueError):
  """The user's settings or files are unusable; the message says what to do."""


class StoppedError(Exception):
  """A signal ended the command early; finished work is saved."""

  def __init__(self, signal_name: str):
    super().__init__(signal_name)
    self.exit_code = 128 + signal.Signals[signal_name]  # as in shells


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def shorten(value: object) -> str:
  """Returns repr(value), shortened so that it fits in a message."""
  return _SHORT.repr(value)


def did_you_mean(name: str, known: Iterable[str]) -> str:
  """Returns ' (did you mean "x"?)' for the most similar name; or ''."""
  # Truncate a long name, which is slow to compare; known names are shorter.
  nearest = difflib.get_close_matches(name[:100], list(known), n=1, cutoff=0.6)
  return f' (did you mean "{nearest[0]}"?)' if nearest else ""


def suggest_name(path: str) -> str:
  """Returns `did_you_mean` for a path's name, among the names in its folder."""
  folder, name = os.path.split(path.rstrip("/"))
  folder = folder or "."
  names = {*os.listdir(folder)} if os.path.isdir(folder) else {name}
  return did_you_mean(name, names - {name})


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
  """Raises UserError unless `value` is one of `choices`."""
  choices = list(choices)
  if value not in choices:
    raise UserError(
      f"{name} = {shorten(value)}{did_you_mean(str(value), choices)}: "
      f"choose one of {', '.join(map(repr, choices))}."
    )


def check_count(
  name: str, value: object, minimum: int = 1, maximum: int = 2**63 - 1
) -> None:
  """Raises UserError unless `value` is an integer from `minimum` to `maximum`.

  The default maximum is the largest int64, because counts are stored as int64.
  """
  if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
    raise UserError(
      f"{name} = {shorten(value)}: give a whole number of at least {minimum}."
    )
  if value > maximum:
    shown_value = f"{value:,}" if value < 10**40 else shorten(value)
    raise UserError(
      f"{name} = {shown_value}: give a whole number of at most {maximum:,}."
    )


def check_real(name: str, value: object, low: float, high: float) -> None:
  """Raises UserError unless `value` is a number from `low` to `high`."""
  if (
    not isinstance(value, (int, float))
    or isinstance(value, bool)
    or not low <= value <= high
  ):
    raise UserError(
      f"{name} = {shorten(value)}: give a number from {low} to {high}."
    )


def check_no_address(name: str, path: str) -> None:
  """Raises UserError if an output folder is an address like "gs://bucket/a"."""
  if "://" in path:
    raise UserError(
      f"{name} = {path!r}: is an address, and files are written only to "
      "folders; give a folder, perhaps one where the address is mounted."
    )


def are_texts(value: object) -> bool:
  """Returns whether `value` is a list or tuple of nonempty strings."""
  return isinstance(value, (list, tuple)) and all(
    isinstance(each, str) and each for each in value
  )


def are_globs(value: object) -> bool:
  """Returns whether `value` is a glob or a list of globs."""
  globs = [value] if isinstance(value, str) else value
  return bool(globs) and are_texts(globs)


def check_globs(name: str, value: object) -> None:
  """Raises UserError unless `value` is None, a glob or a list of globs."""
  if value is not None and not are_globs(value):
    raise UserError(
      f"{name} = {value!r}: give a glob, a list of globs, or None."
    )


def check_library(name: str, extra: str, given: str) -> None:
  """Raises UserError if `given` needs a library of an extra that is missing."""
  if importlib.util.find_spec(name) is None:
    raise UserError(
      f"{given}: needs {name}, which is not installed: pip install "
      f"'palm_mtf[{extra}]'."
    )
