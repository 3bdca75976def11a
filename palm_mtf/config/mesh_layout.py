# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""PaLM's mesh of devices, and how a step is split over devices and over time.

The syntax is Mesh TensorFlow's, except that a rule that matches nothing is an
error. A *dim* is a dimension of a tensor; an *axis* is a dimension of the mesh.
Layouts change speed and memory, never results.

  MESH_SHAPE = "data:2,model:4"                  8 devices, 2 by 4
  LAYOUT = "batch:data,heads:model,d_ff:model"   batch in 2, heads and d_ff in 4
  NUM_MICROBATCHES = 4                           a quarter of the batch at once
  STEPS_PER_LOOP = 100                           on TPUs, 100 steps per call
  STAGES = 4                                     4 meshes, each with a quarter
                                                 of the layers

d_model has two more names, because rules may split it only outside of layers.
`d_model_stored` is the d_model of stored weights, optimizer slots and
gradients; if `data` splits it, each device stores only a slice of these tensors
(ZeRO). `d_model_residual` is the d_model of the residual stream between blocks.

If one axis splits `experts` and `batch`, tokens move to the devices of their
experts and back, by all-to-alls over this axis (model/experts.py).
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Literal

from palm_mtf.config.checked import Count
from palm_mtf.config.device_mesh import DeviceMesh, check_shares, pairs
from palm_mtf.config.model import ModelConfig
from palm_mtf.errors import UserError, did_you_mean

AXES = ("data", "model")
DIMENSIONS = (
  "batch",
  "length",
  "memory_length",
  "d_model",
  "d_model_stored",
  "d_model_residual",
  "heads",
  "d_kv",
  "d_ff",
  "experts",
  "vocab",
)
# {dimension: the dimension whose rule it follows}. A slice of query heads reads
# only its own slice of key and value heads; experts are MLPs, too.
_RULE_OF = {"kv_heads": "heads", "d_expert": "d_ff", "d_shared": "d_ff"}
# No rule can split these: rows of learned positions, T5's distance buckets,
# scores of experts, and the rank or the virtual positions of an adapter.
_WITHOUT_RULE = ("positions", "buckets", "router", "rank", "virtual")
# Splitting these dimensions divides the work of a step; splitting the other two
# in SPLIT_DIMENSIONS divides only memory.
WORK_DIMENSIONS = ("batch", "heads", "d_ff", "experts", "vocab")
SPLIT_DIMENSIONS = (*WORK_DIMENSIONS, "d_model_stored", "d_model_residual")

_UNSPLIT_REASONS = {
  "length": "attention looks along it",
  "memory_length": "attention sums over it",
  "d_model": "every norm sums over it",
  "d_kv": "rotary embedding turns pairs of it",
}

# Tensors of which rules can split two dimensions, but not over one mesh axis.
_TENSORS = (
  ("batch", "length", "heads"),
  ("batch", "length", "d_ff"),
  ("batch", "length", "vocab"),
  ("batch", "length", "d_model_residual"),
  ("vocab", "d_model_stored"),
  ("d_model_stored", "heads", "d_kv"),
  ("d_model_stored", "d_ff"),
  ("experts", "d_model", "d_ff"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshLayout(DeviceMesh):
  """The mesh and the layout rules of PaLM; adds settings to `DeviceMesh`.

  `check_layout` does the checks that need the model's sizes.

  Attributes:
    gradient_dtype: dtype in which the devices of a pod add up the gradients of
      kernels and embedding: "activation", the dtype of activations, or
      "float32", at up to twice the bytes. Gradients of microbatches are always
      added up in float32.
    steps_per_loop: maximum number of steps in one call of a TPU program. A call
      ends earlier if, for example, a checkpoint is due. Signals and the
      watchdog wait for the end of a call.
    stages: number of stages of a pod (a pipeline). Each stage is a mesh (with
      TPU, a slice of that kind) with an equal share of the layers, in their
      order; stage 0 also has the embedding and the loss. While a stage computes
      one microbatch, the other stages compute other microbatches.
    stage_order: order of a stage's forward and backward passes, "1f1b" or
      "gpipe" (steps/plan.py).
  """

  gradient_dtype: Literal["activation", "float32"] = "activation"
  steps_per_loop: Count = 1
  stages: Count = 1
  stage_order: Literal["1f1b", "gpipe"] = "1f1b"

  def __post_init__(self) -> None:
    for axis, size in pairs("MESH_SHAPE", self.mesh_shape, "data:2,model:4"):
      if axis not in AXES:
        raise UserError(
          f'MESH_SHAPE "{axis}:{size}": no axis "{axis}"'
          f"{did_you_mean(axis, AXES)}. Axes: {', '.join(AXES)}."
        )
    rules = pairs("LAYOUT", self.layout, "batch:data,heads:model")
    for dimension, axis in rules:
      _check_rule(dimension, axis)
    super().__post_init__()
    over = dict(rules)
    for tensor in _TENSORS:
      split = [dimension for dimension in tensor if dimension in over]
      for first, second in itertools.pairwise(split):
        if over[first] == over[second]:
          raise UserError(
            f'layout rules "{first}:{over[first]}" and '
            f'"{second}:{over[second]}": the tensor [{", ".join(tensor)}] can '
            f'be split only once over axis "{over[first]}"; move one rule to '
            "the other axis."
          )
    for axis, num_devices in self.axes.items():
      split = [dimension for dimension in over if over[dimension] == axis]
      if num_devices > 1 and not set(split) & set(WORK_DIMENSIONS):
        raise UserError(
          f'mesh axis "{axis}"={num_devices} splits '
          f"{'only ' + ' and '.join(split) if split else 'no dimension'}: "
          "every core would repeat the same work. Add a rule such as "
          f'"{"batch" if axis == "data" else "heads"}:{axis}" to LAYOUT.'
        )
    if self.steps_per_loop > 1 and not self.tpu:
      raise UserError(
        f'STEPS_PER_LOOP = {self.steps_per_loop} and TPU = "": only TPUs do '
        "several steps in a call; set STEPS_PER_LOOP = 1."
      )
    if self.stages > 1 and self.steps_per_loop > 1:
      raise UserError(
        f"STAGES = {self.stages} and STEPS_PER_LOOP = {self.steps_per_loop}: "
        "stages send each other activations in each step; set STEPS_PER_LOOP = "
        "1."
      )

  def axis_of(self, dimension: str) -> str | None:
    """Returns the mesh axis that splits `dimension`; None if none does."""
    name = _RULE_OF.get(dimension, dimension)
    assert name in DIMENSIONS or name in _WITHOUT_RULE, dimension
    return self.rules.get(name)

  def axis_size_of(self, dimension: str) -> int:
    """Returns the number of slices of `dimension`; 1 if no rule splits it."""
    axis = self.axis_of(dimension)
    return self.axes[axis] if axis else 1

  @property
  def moves_tokens(self) -> bool:
    """Whether tokens move to the devices of their experts, and back."""
    axis = self.axis_of("experts")
    return axis == self.axis_of("batch") and self.axis_size_of("experts") > 1

  def stored(self, dims: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of a parameter's dimensions while no layer uses it.

    `dims` are the names in layers. A kernel of experts is not split again along
    d_model over the axis that splits its experts.
    """
    axis = self.axis_of("d_model_stored")
    if axis and axis in map(self.axis_of, dims):
      return tuple(dims)
    return tuple("d_model_stored" if x == "d_model" else x for x in dims)

  def padded_vocab_size(self, vocab_size: int) -> int:
    """Returns the embedding's number of rows, padded to fill equal slices.

    The rows from `vocab_size` on are zeros, which are not trained; their logits
    are masked, and checkpoints omit them. XLA needs equal slices, because
    shapes are static.
    """
    slices = self.axis_size_of("vocab")
    return -(-vocab_size // slices) * slices


def check_layout(
  layout: MeshLayout,
  config: ModelConfig,
  *batch_sizes: int,
  num_pods: int = 1,
) -> None:
  """Raises UserError unless the layout divides all batches and dims evenly.

  `batch_sizes` are all batch sizes of the run; pods share each batch.
  """
  if num_pods > 1 and layout.steps_per_loop > 1:
    raise UserError(
      f"STEPS_PER_LOOP = {layout.steps_per_loop} and NUM_PODS = {num_pods}: "
      "pods exchange gradients after each step; set STEPS_PER_LOOP = 1."
    )
  if config.num_layers % layout.stages:
    raise UserError(
      f"NUM_LAYERS = {config.num_layers} is not divisible by STAGES = "
      f"{layout.stages}; use a divisor of {config.num_layers}."
    )
  parts, batch_macro = layout.num_microbatches, "GLOBAL_BATCH_SIZE"
  for size in batch_sizes:
    check_shares(size, num_pods, parts)
  at_once = [size // num_pods // parts for size in batch_sizes]
  if num_pods > 1:
    batch_macro += " / NUM_PODS"
  if parts > 1:
    batch_macro += " / NUM_MICROBATCHES"
  is_split = layout.axis_size_of("heads") > 1
  if is_split and config.qk_norm == "rms_norm_all_heads":
    raise UserError(
      f'layout rule "heads:{layout.axis_of("heads")}" and QK_NORM = '
      f"{config.qk_norm!r}: all heads share the norm; leave the rule out of "
      "LAYOUT."
    )
  sizes = [
    *(("batch", size, batch_macro) for size in at_once),
    ("heads", config.num_heads, "NUM_HEADS"),
    ("kv_heads", config.num_kv_heads or config.num_heads, "NUM_KV_HEADS"),
    ("d_ff", config.d_ff, "D_FF"),
    *_expert_sizes(layout, config),
    ("d_model_stored", config.d_model, "D_MODEL"),
    ("d_model_residual", config.d_model, "D_MODEL"),
  ]
  for dimension, size, macro in sizes:
    axis = layout.axis_of(dimension)
    if axis and size % layout.axes[axis]:
      rule = f"{_RULE_OF.get(dimension, dimension)}:{axis}"
      nearest = math.gcd(size, layout.axes[axis])
      such = f", such as {axis}={nearest}" if nearest > 1 else ""
      ways = f"another {macro}"
      if dimension == "batch":
        ways = f"or {ways}"
      else:
        ways += f", or a LAYOUT without {rule}"
      raise UserError(
        f"{dimension}={size} is not divisible by mesh axis "
        f"{axis}={layout.axes[axis]} (rule {rule}). Use a divisor of "
        f"{size}{such}, {ways}."
      )


def _expert_sizes(
  layout: MeshLayout, config: ModelConfig
) -> list[tuple[str, int, str]]:
  if not config.has_experts:
    if axis := layout.axis_of("experts"):
      raise UserError(
        f'layout rule "experts:{axis}" and MLP = {config.mlp!r}: the model has '
        'no experts; leave the rule out, or set MLP = "experts".'
      )
    return []
  return [
    ("d_expert", config.expert_size, "D_EXPERT"),
    ("experts", config.num_experts or 0, "NUM_EXPERTS"),
  ]


def _check_rule(dimension: str, axis: str) -> None:
  rule = f'layout rule "{dimension}:{axis}"'
  if dimension not in DIMENSIONS:
    raise UserError(
      f'{rule}: no dimension "{dimension}"'
      f"{did_you_mean(dimension, DIMENSIONS)}. "
      f"Dimensions: {', '.join(SPLIT_DIMENSIONS)}."
    )
  if dimension in _UNSPLIT_REASONS:
    raise UserError(
      f"{rule}: {dimension} cannot be split, because "
      f"{_UNSPLIT_REASONS[dimension]}. "
      f"Dimensions that can be: {', '.join(SPLIT_DIMENSIONS)}."
    )
  if axis not in AXES:
    raise UserError(
      f'{rule}: no axis "{axis}"{did_you_mean(axis, AXES)}. '
      f"Axes: {', '.join(AXES)}."
    )
