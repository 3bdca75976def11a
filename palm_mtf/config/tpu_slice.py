# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Slices of TPU pods: their chips, devices and hosts.

  TPU = "v3-8"           8 cores on 4 chips, the name in Google Cloud
  TPU = "v4-16"          16 cores on 8 chips
  TPU = "v4-12x16x16"    3,072 chips of this shape (each pod in PaLM's paper)
  TPU = "v6e-256"        256 chips of one core each

Chips lie on a torus with the coordinates x, y and z. A v2 or v3 chip is two
devices, one per core; each later chip is one device.
"""

import math
import re
from typing import NamedTuple

from palm_mtf.config.pods import PodsConfig
from palm_mtf.errors import UserError, did_you_mean

_HOST_CHIPS = (2, 2, 1)  # along x, y and z (Cloud TPU's system architecture)
_DEVICES_OF_CHIP = {"v2": 2, "v3": 2, "v4": 1, "v5p": 1, "v6e": 1}
# Optical switches join cubes of 4 x 4 x 4 of these chips into slices that may
# be any box of cubes (Jouppi et al. 2023; Cloud TPU's page on v5p).
BOXES = ("v4", "v5p")

# {number of cores in a slice's name: chips along x, y and z}. A v4 or v5p slice
# has half as many chips as cores, in a box that is as near to a cube as powers
# of 2 allow. A v6e chip has one core.
_FLAT = {8: (2, 2, 1), 32: (4, 4, 1), 128: (8, 8, 1), 512: (16, 16, 1)}
_CUBIC = {
  8: (2, 2, 1),
  **{
    2 ** (n + 1): (2 ** (n // 3), 2 ** ((n + 1) // 3), 2 ** ((n + 2) // 3))
    for n in range(3, 13)
  },
}
_SHAPES = {
  "v2": {**_FLAT, 256: (8, 16, 1)},
  "v3": {**_FLAT, 64: (4, 8, 1), 1024: (16, 32, 1), 2048: (32, 32, 1)},
  **dict.fromkeys(BOXES, _CUBIC),
  "v6e": {
    **{4: (2, 2, 1), 8: (2, 4, 1), 16: (4, 4, 1), 32: (4, 8, 1)},
    **{64: (8, 8, 1), 128: (8, 16, 1), 256: (16, 16, 1)},
  },
}


class TpuSlice(NamedTuple):
  """A slice of a TPU pod.

  Attributes:
    name: the value of TPU.
    chips: numbers of chips along x, y and z.
    devices_of_chip: number of TensorFlow devices on each chip.
  """

  name: str
  chips: tuple[int, int, int]
  devices_of_chip: int

  @property
  def num_devices(self) -> int:
    """Number of TensorFlow devices on all chips."""
    return math.prod(self.chips) * self.devices_of_chip

  @property
  def host_chips(self) -> tuple[int, int, int]:
    """Numbers of chips of each host (Cloud TPU: a VM) along x, y and z."""
    return self.chips if self.name == "v6e-8" else _HOST_CHIPS

  @property
  def num_hosts(self) -> int:
    """Number of hosts; each has the same number of devices."""
    return math.prod(self.chips) // math.prod(self.host_chips)

  @property
  def mesh_shape(self) -> tuple[int, int, int, int]:
    """Shape of TensorFlow's topology: chips along x, y, z; devices per chip."""
    return (*self.chips, self.devices_of_chip)


def chip_of(tpu: str) -> str:
  """Returns the CHIP of the slice called `tpu`: "tpu_v4" for "v4-128"."""
  return f"tpu_{tpu.partition('-')[0]}"


def tpu_slice(name: str) -> TpuSlice:
  """Returns the slice called `name`; raises UserError if there is none."""
  kind, _, size = str(name).partition("-")
  if kind in _SHAPES and size in map(str, _SHAPES[kind]):
    chips = _SHAPES[kind][int(size)]
  elif kind in BOXES and re.fullmatch(
    r"[0-9]{1,3}x[0-9]{1,3}x[0-9]{1,3}", size
  ):
    x, y, z = map(int, size.split("x"))
    chips = (x, y, z)
    if 0 in chips or any(
      n % by for n, by in zip(chips, _HOST_CHIPS, strict=True)
    ):
      raise UserError(
        f'TPU = "{name}": a host has 2 x 2 x 1 chips, so x and y must be even '
        f'numbers, as in "{kind}-4x4x8".'
      )
  else:
    known = [f"{x}-{n}" for x, shapes in _SHAPES.items() for n in shapes]
    raise UserError(
      f'TPU = "{name}": no such slice{did_you_mean(str(name), known)}. Name '
      'a slice by its cores, as in "v3-8" or "v4-128", or a v4 or v5p slice '
      'by its chips, as in "v4-4x4x8".'
    )
  return TpuSlice(name, chips, _DEVICES_OF_CHIP[kind])


def check_pods(
  where: TpuSlice, pods: PodsConfig, *, is_rehearsal: bool = False
) -> None:
  """Raises UserError unless each pod of `pods` can be the TPU slice `where`.

  In a rehearsal, processes without TPUs take the place of hosts.
  """
  given = f'TPU = "{where.name}"'
  hosts = f"{where.num_hosts} host" + "s" * (where.num_hosts > 1)
  if pods.is_managed:
    raise UserError(
      f'{given} and ISLANDS = "auto": a manager chooses only CPU devices; list '
      "the server of each host in ISLANDS."
    )
  if pods.pods == "cluster":
    for pod, entries in enumerate(pods.islands):
      if len(entries) != where.num_hosts and not is_rehearsal:
        raise UserError(
          f"{given} has {hosts}, and ISLANDS gives pod {pod} {len(entries)}; "
          "list the server of each host, in the order of its workers."
        )
  elif not is_rehearsal and (
    pods.pods != "in_process" or pods.num_pods > 1 or where.num_hosts > 1
  ):
    raise UserError(
      f'{given} has {hosts}, PODS = "{pods.pods}" and NUM_PODS = '
      f"{pods.num_pods}: a pod in process is one host's TPUs, and there is "
      "one; for others start `palm_mtf pods serve` on each host and set PODS "
      '= "cluster".'
    )
