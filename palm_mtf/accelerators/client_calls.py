# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls from the client's graph to functions in the hosts' processes."""

import dataclasses
from collections.abc import Sequence

from palm_mtf._tf import tf
from palm_mtf.accelerators.host_calls import call_pod
from palm_mtf.mesh.slices import Region, Slice
from palm_mtf.runtime.processes import Process


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceArray:
  """A device's slice of an array; takes the place of a `Slice`'s variable.

  Attributes:
    process: process that holds the slice.
    key: first arguments of `assign_slice` and `read_slice`.
    module: module of these functions; decoder.py has no `read_slice`.
  """

  process: Process
  key: Sequence[object]
  shape: tf.TensorShape
  dtype: tf.DType
  module: str = "pod"

  @property
  def device(self) -> str:
    """The CPU of the process."""
    return self.process.device

  def value(self) -> tf.Tensor:
    """Returns the value of the slice."""
    key = ["pod.read_slice", *self.key]
    (x,) = self.process.call(call_pod, key, [self.dtype])
    # The value of a single layer still has the dimension of layers; drop it.
    return tf.reshape(x, self.shape)

  def assign(self, value: tf.Tensor) -> tf.Tensor:
    """Returns a tensor whose operation sets the slice."""
    inputs = [f"{self.module}.assign_slice", *self.key, value]
    return self.process.call(call_pod, inputs, [tf.int32])[0]


def make_slice(
  region: Region, names: Sequence[str], held: DeviceArray
) -> Slice:
  """Returns the `Slice` of a device's array; `names` are its rows' names."""
  return Slice(**vars(region), names=names, variable=held, near=held.device)


def after_all(found: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
  """Returns the results of the first host, after all hosts have returned."""
  # All hosts of a pod have to run the program, even if the session fetches only
  # one result; otherwise the collectives of the other hosts would wait forever.
  with tf.control_dependencies([x for x, *_ in found]):
    return [tf.identity(x) for x in found[0]]
