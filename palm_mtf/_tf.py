# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The only import of TensorFlow and Mesh TensorFlow, with every version shim.

Mesh TensorFlow 0.1.21 was written for TensorFlow 1; it imports on TensorFlow
2.16 and later once the few names it takes from the old modules are put back:

* `tensorflow.compat.v1.estimator` (removed in 2.16), of which it uses two hook
  classes that live on in `tf.train`, and `tensorflow.estimator`, the same;
* `ops.register_tensor_conversion_function`, which moved to another module;
* `tensorflow.python.tpu.tpu_config` and `tpu_estimator`, which
  `mesh_tensorflow.transformer` imports but which we never use.

Everything in palm_mtf runs inside an explicit `tf.Graph`; eager TensorFlow
stays usable beside it.
"""

import contextlib
import importlib
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator

# Read once, at the import. What matters reaches us as a Python exception.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


@contextlib.contextmanager
def _silent_unless_it_fails() -> Iterator[None]:
  """Holds back what C++ writes to stderr; shows it if the body raises."""
  sys.stderr.flush()
  terminal = os.dup(2)
  with tempfile.TemporaryFile() as held:
    os.dup2(held.fileno(), 2)
    try:
      yield
    except BaseException:
      held.seek(0)
      os.write(terminal, held.read())
      raise
    finally:
      os.dup2(terminal, 2)
      os.close(terminal)


with _silent_unless_it_fails():
  # Logs device notices before it reads the level set above.
  import tensorflow as tf2
  import tensorflow.compat.v1 as tf
  from tensorflow.python.framework import ops, tensor_conversion_registry


def _add_module(name: str, **attributes: object) -> None:
  """Makes `name` importable unless TensorFlow still has it."""
  try:
    importlib.import_module(name)
  except ImportError:
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    sys.modules[name] = module


class _ModeKeys:
  TRAIN, EVAL, PREDICT = "train", "eval", "infer"


_add_module(
  "tensorflow.compat.v1.estimator",
  SessionRunHook=tf.train.SessionRunHook,
  CheckpointSaverListener=tf.train.CheckpointSaverListener,
  ModeKeys=_ModeKeys,
)
tf.estimator = tf2.estimator = sys.modules["tensorflow.compat.v1.estimator"]
sys.modules.setdefault("tensorflow.estimator", tf2.estimator)
for _name in ("tpu_config", "tpu_estimator"):
  _add_module(f"tensorflow.python.tpu.{_name}")
if not hasattr(ops, "register_tensor_conversion_function"):
  ops.register_tensor_conversion_function = (
    tensor_conversion_registry.register_tensor_conversion_function
  )

import mesh_tensorflow as mtf  # noqa: E402

tf.logging.set_verbosity(tf.logging.ERROR)


def fused(fn: Callable[..., object]) -> Callable[..., object]:
  """Compiles an element-wise function of slices into one pass over memory.

  XLA fuses the element-wise chain, two to four times as fast on a CPU as
  TensorFlow's op after op; matrix products stay outside, where oneDNN is the
  faster one. Decorate functions of a module, not closures: the compiled code
  is shared by all layers that call the same function with the same shapes.
  """
  return tf2.function(fn, jit_compile=True, autograph=False)


__all__ = ["fused", "mtf", "tf"]
