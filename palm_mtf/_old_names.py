# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Keeps old names of palm_mtf's modules and of TensorFlow 1 working.

Old names of palm_mtf's modules work until 0.3. Mesh TensorFlow 0.1.21 was
written for TensorFlow 1. On TensorFlow 2.16 and later its import needs:

* a module `tensorflow.compat.v1.estimator` (removed in 2.16), which holds two
  hook classes of `tf.train` and is also importable as `tensorflow.estimator`;
* `ops.register_tensor_conversion_function`, which moved to another module;
* `tensorflow.python.tpu.tpu_config` and `tpu_estimator`, which
  `mesh_tensorflow.transformer` imports but which we never use.

Names that TensorFlow still has are not changed.
"""

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
    """Returns a spec for a module's old name; None for any other name."""
    for old, new in _NEW_NAMES.items():
      if f"{name}.".startswith(f"{old}."):
        loader = _NewNameLoader(new + name.removeprefix(old))
        return importlib.machinery.ModuleSpec(name, loader)
    return None


class _NewNameLoader:
  def __init__(self, new_name: str):
    self._new_name = new_name

  def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
    """Returns None: Python makes the module, which `exec_module` replaces."""

  def exec_module(self, module: types.ModuleType) -> None:
    old_name = module.__name__
    warnings.warn(
      f"{old_name} is now {self._new_name}; import it by this name, because "
      "the old name goes in 0.3",
      DeprecationWarning,
      stacklevel=2,
    )
    # `import` returns the entry in sys.modules; replace the empty module there.
    sys.modules[old_name] = importlib.import_module(self._new_name)


class MeshTensorFlowFinder:
  """Adds old names to TensorFlow just before `mesh_tensorflow` is imported."""

  @classmethod
  def find_spec(cls, name: str, *unused: object) -> None:
    """Adds the old names; returns None: another finder finds the package."""
    if name == "mesh_tensorflow":
      sys.meta_path.remove(cls)
      _put_back()


def _put_back() -> None:
  """Adds to TensorFlow the names that it lacks and Mesh TensorFlow imports."""
  import tensorflow as tf2
  import tensorflow.compat.v1 as tf
  from tensorflow.python.framework import ops, tensor_conversion_registry

  _add_module(
    "tensorflow.compat.v1.estimator",
    SessionRunHook=tf.train.SessionRunHook,
    CheckpointSaverListener=tf.train.CheckpointSaverListener,
    ModeKeys=types.SimpleNamespace(TRAIN="train", EVAL="eval", PREDICT="infer"),
  )
  tf.estimator = tf2.estimator = sys.modules["tensorflow.compat.v1.estimator"]
  sys.modules.setdefault("tensorflow.estimator", tf2.estimator)
  for name in ("tpu_config", "tpu_estimator"):
    _add_module(f"tensorflow.python.tpu.{name}")
  if not hasattr(ops, "register_tensor_conversion_function"):
    ops.register_tensor_conversion_function = (
      tensor_conversion_registry.register_tensor_conversion_function
    )


def _add_module(name: str, **attributes: object) -> None:
  """Makes `name` an importable module unless TensorFlow still has it."""
  try:
    importlib.import_module(name)
  except ImportError:
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    sys.modules[name] = module
