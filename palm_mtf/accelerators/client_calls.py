# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls from the client's graph to functions in the hosts' processes."""

import dataclasses
from collections.abc import Sequence

from palm_mtf._tf import tf
from palm_mtf.accelerators.host_calls import call_pod
from palm_mtf.mesh.slices import Region, Slice
from palm_mtf.runtime.processes import Process


def call_host(
  process: Process,
  function: str,
  inputs: Sequence[object],
  dtypes: Sequence[tf.DType],
) -> list[tf.Tensor]:
  """Calls a function of pod.py or decoder.py in a host's process."""
  return process.call(call_pod, [function, *inputs], dtypes)


class DeviceArray:
  """A device's slice of an array; takes the place of a `Slice`'s variable."""

  def __init__(
    self,
    process: Process,
    key: Sequence[object],
    shape: Sequence[int],
    dtype: tf.DType,
    module: str = "pod",
  ):
    """Takes the process that holds the slice.

    Args:
      process: the process.
      key: first arguments of `assign_slice` and `read_slice`.
      shape: shape of the slice.
      dtype: its dtype.
      module: module of these functions; decoder.py has no `read_slice`.
    """
    self.device, self._module = process.device, module
    self.shape, self.dtype = tf.TensorShape(shape), dtype
    self._process, self._key = process, key

  def value(self) -> tf.Tensor:
    """Returns the value of the slice."""
    (x,) = call_host(self._process, "pod.read_slice", self._key, [self.dtype])
    # The value of a single layer still has the dimension of layers; drop it.
    return tf.reshape(x, self.shape)

  def assign(self, value: tf.Tensor) -> tf.Tensor:
    """Returns a tensor whose operation sets the slice."""
    key, function = [*self._key, value], f"{self._module}.assign_slice"
    return call_host(self._process, function, key, [tf.int32])[0]


def make_slice(
  region: Region, names: Sequence[str], held: DeviceArray
) -> Slice:
  """Returns the `Slice` of a device's array; `names` are its rows' names."""
  return Slice(
    **dataclasses.asdict(region),
    names=names,
    variable=held,
    near=held.device,
  )


def after_all(found: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
  """Returns the results of the first host, after all hosts have returned."""
  # All hosts of a pod have to run the program, even if the session fetches only
  # one result; otherwise the collectives of the other hosts would wait forever.
  with tf.control_dependencies([x for x, *_ in found]):
    return [tf.identity(x) for x in found[0]]
