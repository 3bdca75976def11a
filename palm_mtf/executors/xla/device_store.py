# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Stores, in this process, clients' arrays on devices, between two calls."""

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from palm_mtf.executors.xla.devices import PodName
from palm_mtf.json_text import read_dataclass
from palm_mtf.runtime.server.clients import at_leave

_Programs = TypeVar("_Programs", bound="PodDevices")


class PodDevices:
  """The devices of a pod or stage, some of which belong to this host.

  Attributes:
    mesh: JAX's mesh of the devices.
    devices: JAX's devices, in the order of the mesh.
    local: mesh numbers of this host's devices, whose slices this process holds.
    each_device: sharding that splits an array's first dimension over all
      devices.
  """

  def __init__(self, mesh: Mesh):
    self.mesh, self.devices = mesh, [*mesh.devices.flat]
    here, all_devices = jax.process_index(), enumerate(self.devices)
    self.local = [i for i, x in all_devices if x.process_index == here]
    self.each_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

  def join(
    self, slices: Mapping[int, Any], whole: jax.ShapeDtypeStruct
  ) -> jax.Array:
    """Makes the array `whole` from the slices of this host's devices."""
    here = [jax.device_put(slices[i], self.devices[i]) for i in self.local]
    shape, sharding = whole.shape, whole.sharding
    return jax.make_array_from_single_device_arrays(shape, sharding, here)

  def slices(self, array: jax.Array) -> dict[int, jax.Array]:
    """Returns the slices of this host's devices, by mesh number."""
    by_device = {x.device: x.data for x in array.addressable_shards}
    return {i: by_device[self.devices[i]] for i in self.local}

  def join_each(self, values: Sequence[Any]) -> jax.Array:
    """Makes an array from the value, [1, ...], of each device of this host."""
    (first, *_), slices = values, dict(zip(self.local, values, strict=True))
    shape = [len(self.devices), *first.shape[1:]]
    return self.join(
      slices,
      jax.ShapeDtypeStruct(shape, first.dtype, sharding=self.each_device),
    )

  def move(self, array: jax.Array) -> jax.Array:
    """Copies an array [devices, ...] to these devices, from another mesh.

    This process must hold the devices with the same numbers in the other mesh.
    """
    shards = {x.index[0].start or 0: x.data for x in array.addressable_shards}
    return self.join_each([shards[i] for i in self.local])


class DeviceStore:
  """What a client keeps in this process for one pod, or one stage of a pod.

  Attributes:
    name: name of the pod or stage, and of the client.
    arrays: variables and optimizer slots on the devices, by name.
    values: other results of programs, such as activations, for later calls.
  """

  def __init__(self, name: PodName):
    self.name = name
    self.arrays: dict[str, jax.Array] = {}
    self.values: dict[Hashable, Any] = {}
    # {(name of an array, number of a device): {row: value}}, until all rows of
    # the device are set.
    self._rows: dict[tuple[str, int], dict[int, np.ndarray]] = {}
    # {name of an array: {number of a device: slice}}, until all slices are set.
    self._slices: dict[str, dict[int, jax.Array]] = {}

  def assign(
    self,
    pod: PodDevices,
    name: str,
    whole: jax.ShapeDtypeStruct,
    device: int,
    value: np.ndarray,
    rows: range = range(1),
    num_rows: int = 1,
  ) -> None:
    """Sets rows of a device's slice of the array `whole`.

    JAX makes an array only from whole slices. So the store keeps rows until it
    has all rows of all devices of this host; then it replaces the array.

    Args:
      device: number of the device in the mesh.
      value: the rows, in any shape that keeps the order of their elements.
      rows: numbers of the rows.
      num_rows: number of rows in a slice, all of the same size; for example, a
        slice of stacked layers has one row per layer.
    """
    with _lock:
      held = self._rows.setdefault((name, device), {})
      held |= zip(rows, value.reshape(len(rows), -1), strict=True)
      if len(held) < num_rows:
        return
      del self._rows[name, device]
      joined = np.stack([held[i] for i in range(num_rows)])
      joined = joined.reshape(whole.sharding.shard_shape(whole.shape))
      slices = self._slices.setdefault(name, {})
      slices[device] = jax.device_put(joined, pod.devices[device])
      if len(slices) == len(pod.local):
        self.arrays[name] = pod.join(self._slices.pop(name), whole)

  def find_slice(self, pod: PodDevices, name: str, device: int) -> jax.Array:
    """Returns the slice of an array on one of this host's devices."""
    with _lock:
      return pod.slices(self.arrays[name])[device]


_stores: dict[bytes, DeviceStore] = {}
# Guards all stores, because a session calls functions in several threads. JAX
# lists the slices of an array at the first access, and the list is wrong if two
# threads access the array at once.
_lock = threading.Lock()


def open_store(
  pod: bytes, make_programs: Callable[[PodName], _Programs]
) -> tuple[DeviceStore, _Programs]:
  """Returns a client's store for a pod or stage, and the pod's programs.

  `pod` is a `PodName` as JSON. The first call for a pod makes its store.
  """
  with _lock:  # so that only one thread makes the programs
    if pod not in _stores:
      _stores[pod] = DeviceStore(read_dataclass(PodName, pod))
    return _stores[pod], make_programs(_stores[pod].name)


def find_store(pod: bytes) -> DeviceStore:
  """Returns the store of a pod or stage, which `open_store` has made before."""
  return _stores[pod]


@at_leave
def free_stores(client: str) -> None:
  """Frees the stores of a client in this process when the client leaves."""
  with _lock:
    for key in [x for x, y in _stores.items() if y.name.client == client]:
      del _stores[key]
