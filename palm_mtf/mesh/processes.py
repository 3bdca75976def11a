# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Python functions that a session calls in the processes of its devices.

A server is a Python process. TensorFlow finds a function in it by the token
under which that process has registered the function; the server publishes its
tokens (cluster/server_info.py).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from palm_mtf._tf import tf


@dataclasses.dataclass(frozen=True, eq=False)  # by identity, as keys
class Process:
  """A process that has devices of a session: this one, or a server."""

  device: str  # its CPU, by TensorFlow's name
  # Tokens of its functions, by their names; None is this process.
  tokens: Mapping[str, str] | None = None

  def call(
    self,
    function: Callable,
    inputs: Sequence[object],
    dtypes: Sequence[tf.DType],
  ) -> list[tf.Tensor]:
    """Adds a call of `function` in this process to the current graph.

    Args:
      function: module-level function of NumPy values, which returns as many as
        there are dtypes; on a server the one of that name.
      inputs: tensors, or what becomes one.
      dtypes: dtypes of what it returns.
    """
    name = function.__name__
    token = (
      self.tokens[name] if self.tokens is not None else function_token(function)
    )
    with tf.device(self.device):
      inputs = [tf.convert_to_tensor(x) for x in inputs]
      return tf.raw_ops.PyFunc(input=inputs, token=token, Tout=list(dtypes))


def function_token(function: Callable) -> str:
  """Returns TensorFlow's token of a function of this process."""
  return _registered(function).get_attr("token").decode()


@functools.cache
def _registered(function: Callable) -> tf.Operation:
  # A function stays registered as long as the graph that calls it.
  with tf.Graph().as_default():
    return tf.numpy_function(function, [], tf.string).op


def cpu_of_process(device: str) -> str:
  """Returns the first CPU of the process that has a device."""
  task, _, _ = device.rpartition("/device:")
  return f"{task}/device:cpu:0"
