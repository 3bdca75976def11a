# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations of the client's session that call functions in a pod's hosts."""

import dataclasses
from collections.abc import Callable, Sequence

from palm_mtf._tf import tf
from palm_mtf.executors.xla.host_calls import call_pod, name_of
from palm_mtf.mesh.slices import Region, Slice
from palm_mtf.runtime.processes import Process


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceArray:
  """A device's slice of a JAX array; checkpoints use it like a tf.Variable."""

  process: Process  # process of the device's host; it holds the slice
  # Arguments by which `assign_slice` and `read_slice` find the slice.
  key: Sequence[object]
  shape: tf.TensorShape
  dtype: tf.DType
  assign_slice: Callable  # `pod_function` that sets the slice
  # `pod_function` that returns the slice; None for decoding weights, which
  # nothing saves.
  read_slice: Callable | None = None

  @property
  def device(self) -> str:
    """The CPU of the host's process; checkpoints place operations there."""
    return self.process.device

  def value(self) -> tf.Tensor:
    """Returns the value of the slice, which the host sends."""
    key = [name_of(self.read_slice), *self.key]
    (x,) = self.process.call(call_pod, key, [self.dtype])
    # The host sends a layer's slice with an extra dimension of size 1 in front.
    return tf.reshape(x, self.shape)

  def assign(self, value: tf.Tensor, read_value: bool = False) -> tf.Tensor:
    """Returns a tensor; running its operation sets the slice to `value`."""
    del read_value  # an argument of tf.Variable.assign
    inputs = [name_of(self.assign_slice), *self.key, value]
    return self.process.call(call_pod, inputs, [tf.int32])[0]


def make_slice(
  region: Region, names: Sequence[str], held: DeviceArray
) -> Slice:
  """Returns a device's slice in the form that checkpoints load and save.

  `names` has the variable's name in checkpoints for each layer of the slice.
  """
  return Slice(**vars(region), names=names, variable=held, near=held.device)


def after_all(found: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
  """Returns the first host's results, once all hosts in `found` return."""
  # A session runs only operations that the fetched results need. If it ran only
  # the first host's call, this host would wait forever in its collectives.
  with tf.control_dependencies([x for x, *_ in found]):
    return [tf.identity(x) for x in found[0]]
