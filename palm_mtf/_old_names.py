# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Gives TensorFlow the old names that the import of Mesh TensorFlow needs.

Mesh TensorFlow 0.1.21 was written for TensorFlow 1. On TensorFlow 2.16 and
later its import needs:

* a module `tensorflow.compat.v1.estimator` (removed in 2.16), which holds two
  hook classes of `tf.train` and is also importable as `tensorflow.estimator`;
* `ops.register_tensor_conversion_function`, which moved to another module;
* `tensorflow.python.tpu.tpu_config` and `tpu_estimator`, which
  `mesh_tensorflow.transformer` imports but which we never use.

Names that TensorFlow still has are not changed.
"""

import importlib
import sys
import types


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
