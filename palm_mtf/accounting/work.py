# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The work of a step: the settings on which its bytes and FLOPs depend."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from palm_mtf.accounting.hardware import describe_remat
from palm_mtf.accounting.optimizer_state import DTYPE_BYTES
from palm_mtf.architecture import parameters
from palm_mtf.architecture.block import Experts, Layer, model_of_layers
from palm_mtf.config import (
  Config,
  ExchangeConfig,
  MeshLayout,
  ModelConfig,
  OptimizerConfig,
  PlanConfig,
  PodsConfig,
)
from palm_mtf.steps.plan import stage_layers

AnyConfig = Config | PlanConfig


class ParameterSlice(NamedTuple):
  """One device's slice of a parameter."""

  sizes: tuple[int, ...]  # of the slice's dimensions, padding included
  axes: tuple[str, ...]  # mesh axes that split it, in the order of MESH_SHAPE
  num_replicas: int  # number of devices that hold this slice

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.sizes)


# [(name of a parameter, one device's slice, number of such parameters)]. A
# parameter stands for those of all layers of its kind.
Slices = Sequence[tuple[str, ParameterSlice, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
  """The work of a pod, or of one pipeline stage of a pod, in a step."""

  model: ModelConfig  # for a stage, with only its layers (`in_stage`)
  # Mesh axes and layout rules of the pod, or of each of its stages.
  mesh: MeshLayout
  optimizer: OptimizerConfig
  pods: PodsConfig  # number of pods, and DCN_DTYPE
  rows: int  # sequences of a step in one pod, over all microbatches
  frozen: tuple[str, ...] = ()  # FROZEN, for the layers of `model`
  # Number of the stage; only stage 0 has parameters outside the layers.
  stage: int = 0
  exchange: ExchangeConfig = dataclasses.field(default_factory=ExchangeConfig)

  @classmethod
  def of(cls, config: AnyConfig, batch_size: int) -> "Work":
    """Returns the work of each pod in a step of `batch_size` sequences."""
    return cls(
      model=describe_remat(config.model, config.hardware),
      mesh=config.mesh_layout,
      optimizer=config.optimizer,
      pods=config.pods,
      rows=batch_size // config.pods.num_pods,
      frozen=config.run.frozen,
      exchange=config.exchange,
    )

  def in_stage(self, stage: int) -> "Work":
    """Returns the work of one pipeline stage of the pod."""
    model, stages = self.model, self.mesh.stages
    layers = stage_layers(model.num_layers, stages)[stage]
    return dataclasses.replace(
      self,
      model=model_of_layers(model, layers),
      frozen=parameters.frozen_in_stage(model, self.frozen, stage, stages),
      stage=stage,
    )

  @property
  def trained(self) -> Mapping[str, int]:
    """{distinct parameter: in how many layers it is trained}."""
    return parameters.count_trained(self.model, self.frozen)

  @property
  def visited(self) -> Mapping[Layer, int]:
    """{kind of layers: how many of them the backward pass visits}."""
    return parameters.count_visited(self.model, self.frozen)

  @property
  def slices(self) -> Slices:
    """One device's slices of all parameters."""
    return _find_slices(self.model, self.mesh, self.stage)

  @property
  def trained_slices(self) -> Slices:
    """`slices` of the trained parameters.

    The number of layers does not include those in which FROZEN matches the
    parameter.
    """
    counts = self.trained
    return [(x, each, counts[x]) for x, each, _ in self.slices if x in counts]

  @property
  def width(self) -> int:
    """Bytes of an activation."""
    return DTYPE_BYTES[self.model.activation_dtype]

  def expert_rows(self, experts: Experts) -> float:
    """Returns how many rows of `experts` a device has per token of a batch.

    A host has a row per choice; those of experts on other devices are not
    multiplied. XLA pads the rows of each expert to whole blocks
    (model/experts.py). If tokens move, each expert has as many rows as it may
    take.
    """
    length = self.model.sequence_length
    if self.mesh.moves_tokens:
      return experts.count * experts.capacity(length) / length
    if not self.mesh.tpu:
      return experts.per_token
    tokens = self.rows * length // self.mesh.num_microbatches
    choices = experts.per_token * tokens // self.mesh.axis_size_of("batch")
    num_here = experts.count // self.mesh.axis_size_of("experts")
    block = max(1, choices // num_here)
    rows = (num_here + choices // block) * block
    return experts.per_token * rows / choices

  def stored_bytes(self, name: str) -> int:
    """Returns the bytes per element of a parameter between steps."""
    return DTYPE_BYTES[parameters.stored_dtype(name, self.model)]

  def gradient_bytes(self, name: str) -> int:
    """Returns the bytes per element of a gradient that waits for the update."""
    if self.mesh.num_microbatches > 1:  # their gradients are summed in float32
      return DTYPE_BYTES["float32"]
    return self.summed_bytes(name)

  def summed_bytes(self, name: str) -> int:
    """Returns the bytes per element in which devices send gradients."""
    is_vector = parameters.parse_name(name).is_vector
    if self.mesh.gradient_dtype == "float32" or is_vector:
      return DTYPE_BYTES["float32"]
    return self.width


@functools.lru_cache(maxsize=16)  # because a search over layouts calls it often
def _find_slices(model: ModelConfig, mesh: MeshLayout, stage: int) -> Slices:
  return [
    (each.name, _slice_of(each, mesh), each.count)
    for each in parameters.distinct_parameters(model)
    if not stage or parameters.parse_name(each.name).layer is not None
  ]


def _slice_of(
  parameter: parameters.DistinctParameter, mesh: MeshLayout
) -> ParameterSlice:
  split = mesh.stored(parameter.dims)
  # Sizes are rounded up, because the embedding may have padding rows.
  sizes = tuple(
    -(-size // mesh.axis_size_of(dim))
    for size, dim in zip(parameter.shape, split, strict=True)
  )
  over = {mesh.axis_of(dim) for dim in split}
  axes = tuple(a for a, size in mesh.axes.items() if a in over and size > 1)
  parts = math.prod(mesh.axes[axis] for axis in axes)
  return ParameterSlice(sizes, axes, mesh.num_devices // parts)
