# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations of the client's session that call functions in a pod's hosts."""

import dataclasses
from collections.abc import Sequence

from palm_mtf._tf import tf
from palm_mtf.accelerators.host_calls import call_pod
from palm_mtf.mesh.slices import Region, Slice
from palm_mtf.runtime.processes import Process


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceArray:
  """A device's slice of a JAX array, which checkpoints use like a tf.Variable.

  Attributes:
    process: process of the device's host; it holds the slice.
    key: arguments that identify the slice in calls of the host's functions
      `assign_slice` and `read_slice`.
    module: "pod" or "decoder": the file with these functions. decoder.py lacks
      `read_slice`, because nothing saves decoding weights.
  """

  process: Process
  key: Sequence[object]
  shape: tf.TensorShape
  dtype: tf.DType
  module: str = "pod"

  @property
  def device(self) -> str:
    """The CPU of the host's process; checkpoints place operations there."""
    return self.process.device

  def value(self) -> tf.Tensor:
    """Returns the value of the slice, which the host sends."""
    key = ["pod.read_slice", *self.key]
    (x,) = self.process.call(call_pod, key, [self.dtype])
    # The host sends a layer's slice with an extra dimension of size 1 in front.
    return tf.reshape(x, self.shape)

  def assign(self, value: tf.Tensor) -> tf.Tensor:
    """Returns a tensor; running its operation sets the slice to `value`."""
    inputs = [f"{self.module}.assign_slice", *self.key, value]
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
