# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes that one device of a mesh keeps from step to step, by the layout.

A weight is split over the axes of its dimensions, of which d_model goes by the
name d_model_stored, and copied over all others. Its slots are split alike. Its
gradient has the dtype of activations, a norm scale's float32; several
microbatches add theirs up in float32. Every device keeps the same.
"""

import dataclasses
import math

from palm_mtf.accounting.optimizer_state import (
  DTYPE_BYTES,
  optimizer_state,
  slot_bytes,
)
from palm_mtf.accounting.params import parameter_dims, parameter_shapes
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import PalmConfig
from palm_mtf.config.optimizer import AdafactorConfig
from palm_mtf.config.parameter_names import parsed


@dataclasses.dataclass(frozen=True)
class DeviceBytes:
  """What one device keeps.

  Attributes:
    weights: float32.
    slots: the optimizer's slots.
    gradients: one step's gradients.
  """

  weights: int
  slots: int
  gradients: int


@dataclasses.dataclass(frozen=True)
class ParameterSlice:
  """One device's slice of a parameter.

  Attributes:
    sizes: sizes of its dimensions, padding included.
    axes: mesh axes that split it, in the order of the mesh.
    copies: how many devices have this slice.
  """

  sizes: tuple[int, ...]
  axes: tuple[str, ...]
  copies: int

  @property
  def size(self) -> int:
    """How many numbers it has."""
    return math.prod(self.sizes)


def parameter_slices(
  config: PalmConfig, mesh: MeshLayout
) -> dict[str, ParameterSlice]:
  """Returns a device's slice of every parameter, by name."""
  slices = {}
  shapes = parameter_shapes(config)
  for name, dims in parameter_dims(config).items():
    split = ["d_model_stored" if dim == "d_model" else dim for dim in dims]
    # Rounded up: the last rows of the embedding may be padding.
    sizes = tuple(
      -(-size // mesh.axis_size_of(dim))
      for size, dim in zip(shapes[name], split, strict=True)
    )
    over = {mesh.rules.get(dim) for dim in split}
    axes = tuple(a for a, size in mesh.axes.items() if a in over and size > 1)
    parts = math.prod(mesh.axes[axis] for axis in axes)
    slices[name] = ParameterSlice(sizes, axes, mesh.num_devices // parts)
  return slices


def gradient_bytes(name: str, config: PalmConfig, mesh: MeshLayout) -> int:
  """Returns the bytes of one number of a parameter's gradient in a step."""
  if mesh.num_microbatches > 1 or parsed(name).is_scale:
    return DTYPE_BYTES["float32"]
  return DTYPE_BYTES[config.activation_dtype]


def device_bytes(
  config: PalmConfig, mesh: MeshLayout, optimizer: AdafactorConfig
) -> DeviceBytes:
  """Returns what one device keeps of weights, slots and gradients."""
  slices = parameter_slices(config, mesh)
  shapes = {name: each.sizes for name, each in slices.items()}
  return DeviceBytes(
    weights=sum(4 * each.size for each in slices.values()),
    slots=slot_bytes(shapes, optimizer_state(optimizer)),
    gradients=sum(
      gradient_bytes(name, config, mesh) * each.size
      for name, each in slices.items()
    ),
  )
