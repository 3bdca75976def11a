# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Imports the user's modules that gin files name, and checks their values."""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from palm_mtf.cli.gin_statements import Import, Reference, Setting
from palm_mtf.errors import UserError
from palm_mtf.machine.process import is_owned, lean_import
from palm_mtf.user_code import user_code


def import_modules(imports: Iterable[Import]) -> None:
  """Imports modules in their order.

  Raises:
    UserError: if a module does not exist, or raises an exception.
  """
  # `python -m palm_mtf` adds the current folder; the script `palm_mtf` doesn't.
  if str(Path.cwd()) not in sys.path:
    sys.path.append(str(Path.cwd()))
  for each in imports:
    where = f"{each.origin}: {each.statement}"
    with user_code(where), _quiet_tensorflow():
      try:
        importlib.import_module(each.module)
      except ImportError as error:
        raise UserError(f"{where}: {error}; is it installed?") from error


@contextlib.contextmanager
def _quiet_tensorflow() -> Iterator[None]:
  """If the body is the first to import TensorFlow, imports it as _tf does."""
  if not is_owned() or "tensorflow" in sys.modules:
    yield
    return
  finder = _TensorFlowFinder()
  sys.meta_path.insert(0, finder)
  try:
    yield
  finally:
    finder.remove()


class _TensorFlowFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Imports TensorFlow as palm_mtf._tf does, without TensorFlow's notices.

  The finder does not import palm_mtf._tf, because the import that it handles
  may come from palm_mtf._tf itself.
  """

  def remove(self) -> None:
    if self in sys.meta_path:
      sys.meta_path.remove(self)

  def find_spec(
    self, name: str, path: object = None, target: object = None
  ) -> importlib.machinery.ModuleSpec | None:
    """Returns TensorFlow's spec with this object as its loader."""
    if name != "tensorflow":
      return None
    self.remove()
    spec = importlib.machinery.PathFinder.find_spec(name)
    if spec:
      self._loader, spec.loader = spec.loader, self
    return spec

  def exec_module(self, module: types.ModuleType) -> None:
    """Runs the module with the original loader, and restores that loader."""
    module.__loader__ = module.__spec__.loader = self._loader
    with lean_import():
      self._loader.exec_module(module)


def convert_to_data(setting: Setting, value: Any) -> Any:
  """Returns the value of a macro as Python's own numbers, texts and lists.

  Arrays and numbers of NumPy, TensorFlow, JAX and PyTorch become lists and
  numbers. Paths become texts.

  Args:
    setting: the macro, for messages.
    value: result of a function of the user, or a constant of the user.

  Raises:
    UserError: if the value is, or contains, anything else.
  """
  reference = setting.value
  if isinstance(reference, Reference) and not reference.called:
    raise UserError(
      f"{setting.cited}: is the function or class itself; write {reference}() "
      "to call it."
    )
  with user_code(setting.cited):
    try:
      return _convert(value)
    except _NoDataError as error:
      raise UserError(
        f"{setting.cited}: gives a {error}; return a number, a text, None, or "
        "a list, tuple or dict of these."
      ) from None
    except RecursionError:
      raise UserError(f"{setting.cited}: contains itself.") from None


def check_characters(setting: Setting, value: Any) -> None:
  """Raises UserError if a text in the value cannot be a path or UTF-8."""
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
  """A value that is not data; the argument is the name of its type."""


def _convert(value: Any) -> Any:
  if hasattr(value, "numpy"):  # a tensor of TensorFlow or PyTorch
    value = value.numpy()
  if hasattr(value, "tolist"):  # an array or a number of any library
    value = value.tolist()
  if value is None or type(value) in (bool, int, float, str):
    return value
  if isinstance(value, os.PathLike):
    return _convert(os.fspath(value))
  if isinstance(value, dict):
    return {_convert(k): _convert(x) for k, x in value.items()}
  if isinstance(value, tuple):
    return tuple(map(_convert, value))
  if isinstance(value, list):
    return [*map(_convert, value)]
  for kind in (int, float, str):  # subclasses, such as an IntEnum
    if isinstance(value, kind):
      return kind(value)
  raise _NoDataError(type(value).__name__)
