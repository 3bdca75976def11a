# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The mesh of a pod's devices, and the rules that split dimensions over it.

The syntax is Mesh TensorFlow's, for a model with dimensions of any name;
mesh_layout.py adds the checks for PaLM's dimensions.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Annotated

from palm_mtf.config.checked import Checked, text_or_empty, whole
from palm_mtf.config.run import MAX_BATCH_SIZE
from palm_mtf.config.tpu_slice import TpuSlice, tpu_slice
from palm_mtf.errors import UserError

MAX_DEVICES = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceMesh(Checked):
  """The mesh and the layout rules, as the user wrote them.

  Attributes:
    mesh_shape: "axis:size" pairs, separated by "," or ";"; "" for one device.
    layout: "dimension:axis" pairs, separated by "," or ";"; "" splits nothing.
    num_microbatches: number of parts of a batch. A step computes one part after
      another, so that memory holds the activations of only one part.
    tpu: the TPU slice of each pod (tpu_slice.py); "" for CPUs or GPUs.
  """

  mesh_shape: str
  layout: str
  num_microbatches: Annotated[int, whole(maximum=MAX_BATCH_SIZE)] = 1
  tpu: Annotated[
    str, text_or_empty('the name of a slice, such as "v3-8", or "" for none')
  ] = ""

  # Only PaLM runs in stages and in loops of steps, so only MeshLayout has these
  # as settings. Code that takes both classes reads these values.
  steps_per_loop = 1
  stages, stage_order = 1, "1f1b"

  def __post_init__(self) -> None:
    super().__post_init__()
    sizes = pairs("MESH_SHAPE", self.mesh_shape, "data:2,model:4")
    for position, (axis, size) in enumerate(sizes):
      if not re.fullmatch(r"[0-9]{1,9}", size) or int(size) < 1:
        raise UserError(
          f'MESH_SHAPE "{axis}:{size}": the size of an axis is a whole number '
          "of at least 1."
        )
      if axis in dict(sizes[:position]):
        raise UserError(
          f'MESH_SHAPE "{axis}:{size}": axis "{axis}" already has a size; give '
          "it one size."
        )
    if self.num_devices > MAX_DEVICES:
      raise UserError(
        f'MESH_SHAPE = "{self.mesh_shape}": has {self.num_devices:,} devices; '
        f"give a mesh of at most {MAX_DEVICES:,}."
      )
    rules = pairs("LAYOUT", self.layout, "batch:data,heads:model")
    for position, (dimension, axis) in enumerate(rules):
      rule, before = f'layout rule "{dimension}:{axis}"', dict(rules[:position])
      if axis not in dict(sizes):
        raise UserError(
          f'{rule}: MESH_SHAPE = "{self.mesh_shape}" has no axis "{axis}"; add '
          f'"{axis}:<size>" to it or drop the rule.'
        )
      if dimension in before:
        raise UserError(
          f"{rule}: there is already a rule "
          f'"{dimension}:{before[dimension]}"; keep one.'
        )
    if self.tpu:
      self._check_slice(tpu_slice(self.tpu))

  def _check_slice(self, where: TpuSlice) -> None:
    if where.num_devices != self.num_devices:
      chips = " x ".join(map(str, where.chips))
      of_chip = (
        f" x {where.devices_of_chip}" if where.devices_of_chip > 1 else ""
      )
      raise UserError(
        f'TPU = "{self.tpu}" has {chips} chips{of_chip} = {where.num_devices} '
        f'devices, but MESH_SHAPE = "{self.mesh_shape}" has '
        f"{self.num_devices}; give the mesh as many."
      )

  @functools.cached_property  # a search of layouts reads it thousands of times
  def axes(self) -> Mapping[str, int]:
    """{mesh axis: size}, in the order of MESH_SHAPE."""
    sizes = pairs("MESH_SHAPE", self.mesh_shape, "data:2,model:4")
    return {axis: int(size) for axis, size in sizes}

  @functools.cached_property
  def rules(self) -> Mapping[str, str]:
    """{dimension: mesh axis that splits it}."""
    return dict(pairs("LAYOUT", self.layout, "batch:data,heads:model"))

  @property
  def num_devices(self) -> int:
    """Number of devices in the mesh, which is one stage of a pod."""
    return math.prod(self.axes.values())

  @property
  def pod_devices(self) -> int:
    """Number of devices in all stages of a pod."""
    return self.stages * self.num_devices


def check_shares(batch_size: int, num_pods: int, num_microbatches: int) -> None:
  """Raises UserError unless pods and microbatches divide a batch evenly."""
  if batch_size % num_pods:
    raise UserError(
      f"a batch of {batch_size} is not divisible by NUM_PODS = {num_pods}. Use "
      f"a divisor of {batch_size}, or another GLOBAL_BATCH_SIZE."
    )
  share = batch_size // num_pods
  if share % num_microbatches:
    batch = f"a batch of {share}"
    if num_pods > 1:
      batch = f"a pod's share of a batch, {batch_size} / {num_pods} = {share},"
    raise UserError(
      f"{batch} is not divisible by NUM_MICROBATCHES = {num_microbatches}. Use "
      f"a divisor of {share}, or another GLOBAL_BATCH_SIZE."
    )


def pairs(name: str, value: object, example: str) -> list[tuple[str, str]]:
  """Splits "a:b,c:d" into the pairs ("a", "b") and ("c", "d").

  Raises UserError, with the setting's `name` and a valid `example`, unless
  `value` is a string of such pairs.
  """
  if not isinstance(value, str):
    raise UserError(f'{name} = {value!r}: give a text such as "{example}".')
  found = []
  for pair in filter(None, re.split(r"[,;\s]+", value)):
    left, separator, right = pair.partition(":")
    if not (left and separator and right) or ":" in right:
      raise UserError(
        f'{name} = "{value}": "{pair}" is not a pair; write "{example}".'
      )
    found.append((left, right))
  return found
