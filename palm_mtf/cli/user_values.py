# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Imports of the user's own modules, which gin files name."""

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
    UserError: a module is not there, or raises an exception.
  """
  # `palm_mtf` as an installed script lacks the folder that `python -m` adds.
  if str(Path.cwd()) not in sys.path:
    sys.path.append(str(Path.cwd()))  # where the user's own modules lie
  for each in imports:
    where = f"{each.origin}: {each.statement}"
    with user_code(where), _quiet_tensorflow():
      try:
        importlib.import_module(each.module)
      except ImportError as error:
        raise UserError(f"{where}: {error}; is it installed?") from error


@contextlib.contextmanager
def _quiet_tensorflow() -> Iterator[None]:
  """Imports TensorFlow as our own modules do, if the body is the first."""
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
  """Imports TensorFlow as palm_mtf._tf does, without its notices.

  palm_mtf._tf itself is not imported here, because it may be the module that
  imports TensorFlow just now, as Mesh TensorFlow may.
  """

  def remove(self) -> None:
    """Leaves TensorFlow to others."""
    if self in sys.meta_path:
      sys.meta_path.remove(self)

  def find_spec(
    self, name: str, path: object = None, target: object = None
  ) -> importlib.machinery.ModuleSpec | None:
    """Returns where TensorFlow is, with this loader."""
    if name != "tensorflow":
      return None
    self.remove()
    spec = importlib.machinery.PathFinder.find_spec(name)
    if spec:
      self._loader, spec.loader = spec.loader, self
    return spec

  def exec_module(self, module: types.ModuleType) -> None:
    """Runs the module with its own loader, which the module keeps."""
    module.__loader__ = module.__spec__.loader = self._loader
    with lean_import():
      self._loader.exec_module(module)


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
