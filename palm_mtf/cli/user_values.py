# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Imports the modules that gin files name, and checks the values of macros."""

import importlib
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from palm_mtf.cli.gin_statements import Import, Reference, Setting
from palm_mtf.errors import UserError
from palm_mtf.machine.process import is_owned
from palm_mtf.user_code import user_code


def import_modules(imports: Collection[Import]) -> None:
  """Imports the user's modules in the order of `imports`.

  Raises:
    UserError: if a module does not exist, or raises an exception.
  """
  # Find modules in the current folder. `python -m palm_mtf` adds this folder to
  # sys.path, but the script `palm_mtf` does not.
  if str(Path.cwd()) not in sys.path:
    sys.path.append(str(Path.cwd()))
  if imports and is_owned():
    # The user's modules may import TensorFlow. Import it silently before them.
    import palm_mtf._tf  # noqa: F401

  for each in imports:
    where = f"{each.origin}: {each.statement}"
    with user_code(where):
      try:
        importlib.import_module(each.module)
      except ImportError as error:
        raise UserError(f"{where}: {error}; is it installed?") from error


def convert_to_data(setting: Setting, value: Any) -> Any:
  """Returns a macro's value as numbers, strings, None, lists, tuples, dicts.

  Arrays and numbers of NumPy, TensorFlow, JAX and PyTorch become lists and
  numbers. Paths become strings.

  Args:
    setting: setting of the macro, for messages.
    value: result of a user's function, or a user's constant.

  Raises:
    UserError: if the value is, or contains, an object of another kind.
  """
  reference = setting.value
  if isinstance(reference, Reference) and not reference.called:
    raise UserError(
      f"{setting.cited}: is the function or class itself; write {reference}() "
      "to call it."
    )
  with user_code(setting.cited):
    try:
      return _convert(value, setting.cited)
    except RecursionError:
      raise UserError(f"{setting.cited}: contains itself.") from None


def check_characters(setting: Setting, value: Any) -> None:
  """Raises UserError if a string in `value` has a NUL or invalid characters."""
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


def _convert(value: Any, cited: str) -> Any:
  if hasattr(value, "numpy"):  # a tensor of TensorFlow or PyTorch
    value = value.numpy()
  if hasattr(value, "tolist"):  # an array or a number of any library
    value = value.tolist()
  if value is None or type(value) in (bool, int, float, str):
    return value
  if isinstance(value, os.PathLike):
    return _convert(os.fspath(value), cited)
  if isinstance(value, dict):
    return {_convert(k, cited): _convert(x, cited) for k, x in value.items()}
  if isinstance(value, list | tuple):
    items = [_convert(each, cited) for each in value]
    return tuple(items) if isinstance(value, tuple) else items
  for kind in (int, float, str):  # value may be of a subclass, such as IntEnum
    if isinstance(value, kind):
      return kind(value)
  raise UserError(
    f"{cited}: gives a {type(value).__name__}; return a number, a text, None, "
    "or a list, tuple or dict of these."
  )
