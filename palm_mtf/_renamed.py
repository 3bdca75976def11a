# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Keeps old names of modules working until 0.3."""

import importlib
import importlib.machinery
import sys
import types
import warnings

_NEW_NAMES = {
  "palm_mtf.layers": "palm_mtf.unitransformer",
  "palm_mtf.pods": "palm_mtf.foreign_models",
}


class RenamedFinder:
  """Finds a renamed package, and the modules in it, by their old names.

  The first import of each old name warns. The old and the new name give the
  same module object, so the module's classes and registrations exist only once.
  """

  @classmethod
  def find_spec(
    cls, name: str, *unused: object
  ) -> importlib.machinery.ModuleSpec | None:
    """Returns a spec for an old name; None for any other name."""
    for old, new in _NEW_NAMES.items():
      if f"{name}.".startswith(f"{old}."):
        loader = _NewNameLoader(new + name.removeprefix(old))
        return importlib.machinery.ModuleSpec(name, loader)
    return None


class _NewNameLoader:
  def __init__(self, new_name: str):
    self._new_name = new_name

  def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
    """Lets Python make an empty module."""

  def exec_module(self, module: types.ModuleType) -> None:
    old_name = module.__name__
    warnings.warn(
      f"{old_name} is now {self._new_name}; import it by this name, because "
      "the old name goes in 0.3",
      DeprecationWarning,
      stacklevel=2,
    )
    # `import` returns the entry in sys.modules, so replace the empty module.
    sys.modules[old_name] = importlib.import_module(self._new_name)
