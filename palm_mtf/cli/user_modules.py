# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Imports of the user's own modules, which gin files name."""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path

from palm_mtf.cli.gin_statements import Import
from palm_mtf.errors import UserError
from palm_mtf.machine.lean_import import lean_import
from palm_mtf.machine.own_process import is_owned
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
