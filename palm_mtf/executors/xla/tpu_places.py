# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Places a mesh's devices on a TPU slice to keep most traffic short-range."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from palm_mtf.config.tpu_slice import TpuSlice


class TpuPlace(NamedTuple):
  """A device of a TPU slice: the chip's x, y and z, and the core on the chip.

  JAX calls them the device's `coords` (x, y, z) and its `core_on_chip`.
  """

  x: int
  y: int
  z: int
  core: int


def tpu_places(where: TpuSlice, model_size: int) -> list[TpuPlace]:
  """Returns the place of each device of a mesh, in the mesh's order.

  The mesh's last axis, of size `model_size`, carries the most traffic, many
  messages per layer. So the devices along this axis form a box of neighbouring
  chips, if the slice has a box of that size. Within the box, the mesh's order
  goes over the devices of a chip, then over chips along x, y and z.
  """
  box, left = [], model_size
  for n in (where.devices_of_chip, *where.chips):
    box.append(math.gcd(left, n))
    left //= box[-1]
  device, *chips = box
  if left > 1:  # no box has `model_size` devices: take chip by chip
    device, chips = where.devices_of_chip, [1, 1, 1]
  return [
    TpuPlace(
      *(base + step for base, step in zip(corner, chip, strict=True)), i + j
    )
    for corner in _box_corners(where.chips, chips)
    for i in range(0, where.devices_of_chip, device)
    for chip in _box_corners(chips)
    for j in range(device)
  ]


def host_places(where: TpuSlice) -> list[list[TpuPlace]]:
  """Returns, per host of a slice, (x, y, z, core) of each of its devices."""
  return [
    [
      TpuPlace(*(x + y for x, y in zip(corner, chip, strict=True)), core)
      for chip in _box_corners(where.host_chips)
      for core in range(where.devices_of_chip)
    ]
    for corner in _box_corners(where.chips, where.host_chips)
  ]


def _box_corners(
  shape: Sequence[int], step: Sequence[int] = (1, 1, 1)
) -> list[tuple[int, int, int]]:
  # Returns the lowest corners of boxes of size `step` that fill a box of size
  # `shape`. Sizes and corners are (x, y, z); x changes fastest.
  xs, ys, zs = (range(0, n, by) for n, by in zip(shape, step, strict=True))
  return [(x, y, z) for z in zs for y in ys for x in xs]
