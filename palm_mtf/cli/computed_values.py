# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Values of macros: data, which the user's own functions may give."""

import os
from typing import Any

from palm_mtf.cli.gin_statements import Reference, Setting
from palm_mtf.errors import UserError
from palm_mtf.user_code import user_code


def computed_data(setting: Setting, value: Any) -> Any:
  """Returns the value of a macro as Python's own numbers, texts and lists.

  Arrays and numbers of NumPy, TensorFlow, JAX and PyTorch become lists and
  numbers, and paths texts.

  Args:
    setting: the macro, for messages.
    value: value that a function or a constant of the user has.

  Raises:
    UserError: the value is, or contains, anything else.
  """
  reference = setting.value
  if isinstance(reference, Reference) and not reference.called:
    raise UserError(
      f"{setting.cited}: is the function or class itself; write {reference}() "
      "to call it."
    )
  with user_code(setting.cited):
    try:
      return _data(value)
    except _NoDataError as error:
      raise UserError(
        f"{setting.cited}: gives a {error}; return a number, a text, None, or "
        "a list, tuple or dict of these."
      ) from None
    except RecursionError:
      raise UserError(f"{setting.cited}: contains itself.") from None


def check_characters(setting: Setting, value: Any) -> None:
  """Raises UserError if a text in the value can be neither a path nor UTF-8."""
  if isinstance(value, str):
    try:
      bad = "\0" in value
      os.fsencode(value)
    except UnicodeEncodeError:
      bad = True
    if bad:
      raise UserError(
        f"{setting.cited}: {value!r} has a character that neither a path nor a "
        "text in UTF-8 can have; remove it."
      )
  elif isinstance(value, dict):
    for item in value.items():
      check_characters(setting, item)
  elif isinstance(value, list | tuple):
    for item in value:
      check_characters(setting, item)


class _NoDataError(Exception):
  """A value is no data; the argument is the name of its type."""


def _data(value: Any) -> Any:
  if hasattr(value, "numpy"):  # a tensor of TensorFlow or PyTorch
    value = value.numpy()
  if hasattr(value, "tolist"):  # an array or a number of any library
    value = value.tolist()
  if value is None or type(value) in (bool, int, float, str):
    return value
  if isinstance(value, os.PathLike):
    return _data(os.fspath(value))
  if isinstance(value, dict):
    return {_data(k): _data(x) for k, x in value.items()}
  if isinstance(value, tuple):
    return tuple(map(_data, value))
  if isinstance(value, list):
    return [*map(_data, value)]
  for kind in (int, float, str):  # an IntEnum, for one
    if isinstance(value, kind):
      return kind(value)
  raise _NoDataError(type(value).__name__)
