# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Virtual slices, and how their devices hold arrays."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from palm_mtf._tf import tf
from palm_mtf.errors import UserError

Shards = list[tf.Tensor]  # of an array: the shard of each device of a slice


@dataclasses.dataclass(frozen=True, eq=False)  # by identity, as keys
class VirtualSlice:
  """Logical devices, which a client asked for by the shape of their mesh.

  Attributes:
    mesh_shape: mesh axes and their sizes, "x:2,y:2".
    owner: the client that owns the slice.
    devices: TensorFlow's name of the device that a logical device is bound to.
  """

  mesh_shape: str
  owner: Any = dataclasses.field(repr=False)
  devices: Sequence[str] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Sharding:
  """How a slice holds an array: each device has a region of it, its shard.

  Attributes:
    slice: the slice.
    shape: shape of the whole array.
    dtype: dtype of the array.
    sizes: shape of a shard.
    begins: for each device, the first indices of its region.
  """

  slice: VirtualSlice
  shape: tuple[int, ...]
  dtype: tf.DType
  sizes: tuple[int, ...]
  begins: tuple[tuple[int, ...], ...]

  @property
  def shard_bytes(self) -> int:
    """Bytes of a shard."""
    return math.prod(self.sizes) * self.dtype.size

  def count_bytes(self, num_arrays: int) -> dict[str, int]:
    """Returns the bytes of the shards of equal arrays, by device."""
    return dict.fromkeys(self.slice.devices, num_arrays * self.shard_bytes)

  @property
  def regions(self) -> list[tuple[slice, ...]]:
    """Indices of each device's region."""
    return [
      tuple(slice(x, x + n) for x, n in zip(begin, self.sizes, strict=True))
      for begin in self.begins
    ]


def split_rows(
  slice_: VirtualSlice, shape: Sequence[int], dtype: tf.DType, name: str
) -> Sharding:
  """Gives each device equally many rows of an array, or a copy of a scalar.

  Raises:
    UserError: that cannot be; `name` names the array.
  """
  n = len(slice_.devices)
  if not shape:
    return Sharding(slice_, (), dtype, (), ((),) * n)
  rows, rest = divmod(shape[0], n)
  if rest or not rows:
    raise UserError(
      f"{name} has {shape[0]} rows, which the {n} devices of slice "
      f'"{slice_.mesh_shape}" cannot share equally; give a multiple of {n}.'
    )
  begins = tuple((i * rows, *[0] * len(shape[1:])) for i in range(n))
  return Sharding(slice_, tuple(shape), dtype, (rows, *shape[1:]), begins)


def move(shards: Shards, held: Sharding, wanted: Sharding) -> Shards:
  """Sends an array to the devices of another sharding.

  If both shardings have equal regions, device i sends to device i.
  """
  moved = []
  for i, device in enumerate(wanted.slice.devices):
    # Of devices with equal shards, the last one in this order sends.
    order = sorted(range(len(shards)), key=lambda j, i=i: j == i)
    senders = {held.begins[j]: shards[j] for j in order}
    with tf.device(device):
      moved.append(_join(senders, held.sizes, wanted.begins[i], wanted.sizes))
  return moved


def _join(
  shards: dict[tuple[int, ...], tf.Tensor],
  held: tuple[int, ...],
  begin: tuple[int, ...],
  sizes: tuple[int, ...],
  first: tuple[int, ...] = (),
) -> tf.Tensor:
  """Joins a region from shards of shape `held`, by where they begin.

  `first` holds the first indices of the shards to join in the leading dims.
  """
  dim = len(first)
  if dim == len(sizes):
    if (first, held) == (begin, sizes):
      return shards[first]
    cuts = zip(begin, sizes, first, strict=True)
    return shards[first][
      tuple(slice(max(0, x - y), x + n - y) for x, n, y in cuts)
    ]
  parts = [
    _join(shards, held, begin, sizes, (*first, x))
    for x in sorted({each[dim] for each in shards})
    if x < begin[dim] + sizes[dim] and begin[dim] < x + held[dim]
  ]
  return parts[0] if len(parts) == 1 else tf.concat(parts, dim)
