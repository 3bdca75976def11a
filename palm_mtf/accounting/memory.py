# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory of a device for weights, optimizer slots and gradients, by layout."""

import dataclasses
import functools
import math
from collections.abc import Sequence

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
  """Bytes of one device, alike on all devices of a pod."""

  weights: int  # float32
  slots: int
  gradients: int  # of a step


@dataclasses.dataclass(frozen=True)
class ParameterSlice:
  """One device's slice of a parameter."""

  sizes: tuple[int, ...]  # of its dimensions, padding included
  axes: tuple[str, ...]  # mesh axes that split it, in the order of the mesh
  num_replicas: int  # devices with this slice

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.sizes)


def parameter_slices(
  config: PalmConfig, mesh: MeshLayout
) -> dict[str, ParameterSlice]:
  """Returns a device's slice of every parameter, by name."""
  slices = {}
  shapes = parameter_shapes(config)
  for name, dims in parameter_dims(config).items():
    # A stored parameter is split by the rule of d_model_stored, activations by
    # that of d_model_residual.
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


# A search over layouts asks many thousand times, and layers are alike.
@functools.lru_cache(maxsize=16)
def distinct_slices(
  config: PalmConfig, mesh: MeshLayout
) -> Sequence[tuple[str, ParameterSlice, int]]:
  """Returns name and slice of every parameter of one layer, and of none.

  The third is how many there are alike: the number of layers, or 1.
  """
  one_layer = dataclasses.replace(config, num_layers=1)
  return [
    (name, each, 1 if parsed(name).layer is None else config.num_layers)
    for name, each in parameter_slices(one_layer, mesh).items()
  ]


def gradient_bytes(name: str, config: PalmConfig, mesh: MeshLayout) -> int:
  """Returns the bytes of an element of a parameter's gradient."""
  # Microbatches are summed in float32.
  if mesh.num_microbatches > 1:
    return DTYPE_BYTES["float32"]
  return summed_bytes(name, config, mesh)


def summed_bytes(name: str, config: PalmConfig, mesh: MeshLayout) -> int:
  """Returns the bytes of an element of a gradient that devices add up."""
  if mesh.gradient_dtype == "float32" or parsed(name).is_scale:
    return DTYPE_BYTES["float32"]
  return DTYPE_BYTES[config.activation_dtype]


def device_bytes(
  config: PalmConfig, mesh: MeshLayout, optimizer: AdafactorConfig
) -> DeviceBytes:
  """Returns the bytes of one device."""
  slices = distinct_slices(config, mesh)
  state = optimizer_state(optimizer)
  return DeviceBytes(
    weights=sum(4 * each.size * n for _, each, n in slices),
    # Slots are split as their parameter is.
    slots=sum(slot_bytes({x: each.sizes}, state) * n for x, each, n in slices),
    gradients=sum(
      gradient_bytes(name, config, mesh) * each.size * n
      for name, each, n in slices
    ),
  )
