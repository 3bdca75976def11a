# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations that call a Python function in the process of a device.

A server is a Python process. TensorFlow finds a function in a process by the
token under which the process registered the function. Each server publishes its
tokens (runtime/server_info.py), which clients write into operations.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from palm_mtf._tf import tf


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity, as a key
class Process:
  """This process or a server, in which a session can call Python functions."""

  device: str  # TensorFlow's name of the process's CPU
  # {function name: token by which TensorFlow finds the server's function}; None
  # for this process.
  tokens: Mapping[str, str] | None = None

  def call(
    self,
    function: Callable,
    inputs: Sequence[object],
    dtypes: Sequence[tf.DType],
  ) -> list[tf.Tensor]:
    """Adds an operation that calls `function` in the process of `device`.

    Args:
      function: module-level function of NumPy values. A server calls its own
        function of the same name.
      inputs: tensors, or values to convert to tensors.
      dtypes: dtype of each value that `function` returns.
    """
    name = function.__name__
    token = (
      self.tokens[name] if self.tokens is not None else function_token(function)
    )
    with tf.device(self.device):
      inputs = [tf.convert_to_tensor(x) for x in inputs]
      return tf.raw_ops.PyFunc(input=inputs, token=token, Tout=list(dtypes))


def function_token(function: Callable) -> str:
  """Returns the token by which TensorFlow finds a function of this process."""
  return _registered(function).get_attr("token").decode()


@functools.cache
def _registered(function: Callable) -> tf.Operation:
  # TensorFlow keeps a function registered only while a graph that calls the
  # function exists. The cached result keeps such a graph.
  with tf.Graph().as_default():
    return tf.numpy_function(function, [], tf.string).op
