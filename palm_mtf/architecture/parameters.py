# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Names, shapes and counts of parameters.

Parameters have these names in checkpoints:

embedding               the table of the input embedding
layer_007/attention/q   a kernel
layer_007/norm/scale    the scale of a norm
final_norm/scale        the scale of the last norm
layer_007/attention/q_lora_a   a factor of an adapter (adapter.py)
layer_007/attention/k_virtual  an adapter's keys of virtual positions

The last word says what a parameter is: a table (embedding), a scale or a bias;
otherwise a kernel. Names in Mesh TensorFlow's own layers end with the same
words, such as "encoder/block_000/layer_000/SelfAttention/q" and
"shared/embedding".

A parameter also has a role, which says what training does with it:

role     gradient and update   optimizer slots   in checkpoints   between pods
trained  yes                   yes               yes              the gradient
adapter  yes                   yes               yes              the gradient
masked   yes, but 0 stays 0    yes               yes              the gradient
state    by another rule       no                yes              sums
frozen   no                    no                yes              nothing

A state is what the router of experts knows of earlier steps. In place of a
gradient, the backward pass gives how many tokens chose each expert. A masked
parameter (KEEP_ZEROS) is its own mask, so that checkpoints, exports and imports
of a pruned model need no other file.
"""

import collections
import fnmatch
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from palm_mtf.architecture.adapter import MAGNITUDE, PROMPT, VIRTUAL, A, B
from palm_mtf.architecture.block import (
  ENCODER,
  LOAD,
  NORMS,
  ROUTER,
  ROUTER_BIAS,
  Attention,
  Branch,
  Dims,
  Experts,
  Layer,
  model_of,
)
from palm_mtf.config import ModelConfig
from palm_mtf.errors import UserError, did_you_mean

# Layer numbers have at least three digits, so that names sort up to layer 999.
_IN_LAYER = re.compile(r"layer_(\d{3,})/(.+)")
# Tables whose rows make the input of the first layer.
INPUT_TABLES = ("embedding", PROMPT, "position_embedding")
NUM_BUCKETS = 32  # of distances, for POSITIONS = "t5"; the same as in T5
# Kernel that maps a distance's encoding to a key; for "transformer_xl".
RELATIVE = "attention/relative"


class ParameterName(NamedTuple):
  """The name of a parameter, split into the layer's number and the rest."""

  layer: int | None  # from 0; None outside the layers
  part: str  # name in the layer ("attention/q"); outside, the whole name

  @property
  def kind(self) -> str:
    """For metrics: "embedding", "norm", "attention", "mlp" or "logits"."""
    part = self.part
    if self.layer is not None:
      part = part.removeprefix(f"{ENCODER}/")
    first = part.partition("/")[0]
    for kind in ("norm", "embedding"):  # in "mlp_norm", "position_embedding"
      if first.endswith(kind):
        return kind
    return first

  @property
  def last(self) -> str:
    """The last word of the name, such as "q" for "attention/q"."""
    return self.part.rpartition("/")[2]

  @property
  def is_kernel(self) -> bool:
    """Whether the parameter is a kernel, not a table, scale or bias."""
    tables = ("embedding", VIRTUAL)
    return not self.is_vector and not self.last.endswith(tables)

  @property
  def is_scale(self) -> bool:
    """Whether the parameter is the scale of a norm."""
    return self.last == "scale"

  @property
  def is_state(self) -> bool:
    """Whether the parameter follows the loads of experts (`Experts.states`)."""
    return self.part in (LOAD, ROUTER_BIAS)

  @property
  def is_vector(self) -> bool:
    """Whether the parameter is a scale, bias, magnitude or load of experts."""
    ends = ("bias", MAGNITUDE)
    return self.is_scale or self.is_state or self.last.endswith(ends)

  @property
  def is_adapter(self) -> bool:
    """Whether the parameter belongs to an adapter."""
    ends = (A, B, MAGNITUDE, VIRTUAL)
    return self.part == PROMPT or self.part.endswith(ends)

  @property
  def is_float32(self) -> bool:
    """Whether the parameter is never cast to bfloat16."""
    return self.is_vector or self.part == ROUTER

  @property
  def is_masked(self) -> bool:
    """Whether pruning sets weights of it to 0, which KEEP_ZEROS keeps."""
    others = (ROUTER, RELATIVE)
    is_of_layer = self.layer is not None and self.part not in others
    return is_of_layer and self.is_kernel and not self.is_adapter

  @property
  def is_expert(self) -> bool:
    """Whether the parameter stacks the kernels of several experts."""
    return self.part.startswith("mlp/experts/")


def layer_name(layer: int) -> str:
  """Returns the prefix of a layer's parameter names, such as "layer_007"."""
  return f"layer_{layer:03d}"


def parse_name(name: str) -> ParameterName:
  """Splits a parameter's name, such as "layer_007/attention/q"."""
  if match := _IN_LAYER.fullmatch(name):
    return ParameterName(int(match[1]), match[2])
  return ParameterName(None, name)


Role = Literal["trained", "frozen", "adapter", "state"]


class Parameter(NamedTuple):
  """A parameter of a model, and what training does with it."""

  name: str  # in checkpoints
  dims: tuple[str, ...]  # names of its dimensions
  role: Role

  @property
  def is_trained(self) -> bool:
    """Whether a step updates the parameter."""
    return self.role in ("trained", "adapter", "state")


@functools.lru_cache(maxsize=64)  # because a search over layouts calls it often
def parameters_of(
  config: ModelConfig, frozen: Sequence[str] = ()
) -> tuple[Parameter, ...]:
  """Returns the parameters in the order of creation; `frozen` is a tuple."""
  dims = parameter_dims(config)
  untrained = frozen_names(dims, frozen)
  if config.adapter != "none":  # an adapter's base is frozen
    untrained |= {x for x in dims if not parse_name(x).is_adapter}
  return tuple(
    Parameter(name, x, _role(name, untrained)) for name, x in dims.items()
  )


def _role(name: str, untrained: set[str]) -> Role:
  if name in untrained:
    return "frozen"
  if parse_name(name).is_adapter:
    return "adapter"
  return "state" if parse_name(name).is_state else "trained"


def saved_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
  """Returns {name: shape} of a run's checkpoints: only the adapter, if any."""
  shapes = parameter_shapes(config)
  if config.adapter == "none":
    return shapes
  return {x: y for x, y in shapes.items() if parse_name(x).is_adapter}


def read_dtype(name: str, config: ModelConfig) -> str:
  """Returns the dtype in which a step reads a parameter."""
  return "float32" if parse_name(name).is_float32 else config.activation_dtype


def stored_dtype(name: str, config: ModelConfig) -> str:
  """Returns the dtype of a parameter between steps: as read, for a base."""
  is_base = config.adapter != "none" and not parse_name(name).is_adapter
  return read_dtype(name, config) if is_base else "float32"


def sent_dtype(name: str, dcn_dtype: str) -> str:
  """Returns the dtype in which pods exchange a parameter's gradient.

  The counts that a state gets in place of a gradient are not rounded.
  """
  return "float32" if parse_name(name).is_state else dcn_dtype


def user_name(name: str) -> str:
  """Returns a parameter's name for FROZEN: "layers/7/attention/q"."""
  layer, part = parse_name(name)
  return part if layer is None else f"layers/{layer}/{part}"


def frozen_names(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
  """Returns those of `names` that one of the patterns of FROZEN matches.

  The loads of routers are never among them: they are measured, not trained.
  """
  # fnmatch's "*" also matches "/".
  return {
    name
    for name in names
    if parse_name(name).part != LOAD
    and any(fnmatch.fnmatchcase(user_name(name), x) for x in patterns)
  }


def check_frozen(names: Iterable[str], patterns: Sequence[str]) -> None:
  """Raises UserError if a pattern matches nothing, or all that is trained."""
  names = [x for x in names if parse_name(x).part != LOAD]
  known = {x: None for name in names for x in _forms(user_name(name))}
  for pattern in patterns:
    if not frozen_names(names, [pattern]):
      raise UserError(
        f"FROZEN = {list(patterns)!r}: no parameter matches "
        f'"{pattern}"{did_you_mean(pattern, known)}; give names of parameters, '
        'such as "embedding" or "layers/7/attention/q", with "*" for any '
        "characters."
      )
  trained = {x for x in names if not parse_name(x).is_state}
  trained = {x for x in trained if parse_name(x).is_adapter} or trained
  if trained <= frozen_names(names, patterns):
    raise UserError(
      f"FROZEN = {list(patterns)!r}: freezes all parameters, so nothing is "
      "left to train; take patterns out."
    )


def _forms(name: str) -> Iterable[str]:
  # Yields the user's name of a parameter and patterns that users may mean.
  parts = name.split("/")
  if parts[0] == "layers":
    yield "/".join(["layers", "*", *parts[2:]])
    yield "/".join(["layers", "*", parts[2], "*"])
    yield f"layers/{parts[1]}/*"
  yield name


@functools.lru_cache(maxsize=64)
def count_trained(
  config: ModelConfig, frozen: Sequence[str] = ()
) -> Mapping[str, int]:
  """Returns {distinct parameter: in how many layers it is trained}.

  Outside the layers the count is 1; parameters that are trained nowhere are
  missing. `frozen` is FROZEN, a tuple. See `distinct_parameters`.
  """
  if not frozen and config.adapter == "none":  # there may be many layers
    return {x.name: x.count for x in distinct_parameters(config)}
  layers, first = model_of(config).layers, {}
  for i, layer in enumerate(layers):
    first.setdefault(layer, i)
  counts: collections.Counter[str] = collections.Counter()
  for x in parameters_of(config, frozen):
    if x.is_trained:
      i, part = parse_name(x.name)
      own = part if i is None else f"{layer_name(first[layers[i]])}/{part}"
      counts[own] += 1
  return counts


@functools.lru_cache(maxsize=64)
def first_in_backward(config: ModelConfig, frozen: Sequence[str] = ()) -> int:
  """Returns the lowest layer that the backward pass visits.

  The backward pass ends where no earlier parameter is trained. The result is
  the number of layers if the backward pass visits no layer.
  """
  if not frozen and config.adapter == "none":
    return 0
  layers = [config.num_layers]
  for name, _, _ in (x for x in parameters_of(config, frozen) if x.is_trained):
    layer, part = parse_name(name)
    if part in INPUT_TABLES:
      layers.append(0)
    elif layer is not None:
      layers.append(layer)
  return min(layers)


def first_stage_in_backward(
  config: ModelConfig, frozen: Sequence[str], num_stages: int
) -> int:
  """Returns the first pipeline stage with a backward pass.

  The result is the number of stages if no stage has one.
  """
  layer = first_in_backward(config, tuple(frozen))
  return layer * num_stages // config.num_layers


def count_visited(
  config: ModelConfig, frozen: Sequence[str] = ()
) -> Mapping[Layer, int]:
  """Returns {kind of layers: how many of them the backward pass visits}."""
  if not frozen and config.adapter == "none":
    return {x.layer: x.count for x in model_of(config).kinds}
  first = first_in_backward(config, tuple(frozen))
  return collections.Counter(model_of(config).layers[first:])


def frozen_in_stage(
  config: ModelConfig, frozen: Sequence[str], stage: int, num_stages: int
) -> tuple[str, ...]:
  """Returns FROZEN for a model with only the layers of one pipeline stage.

  The layers of the stage are numbered from 0. The embedding stands for all that
  comes before the stage: it is trained if anything before the stage is trained.
  """
  if not frozen:
    return ()
  share = config.num_layers // num_stages
  begin = stage * share
  names = frozen_names(parameter_dims(config), frozen)
  found = [x for x in names if parse_name(x).layer is None]
  if first_in_backward(config, tuple(frozen)) < begin:
    found = [x for x in found if parse_name(x).kind != "embedding"]
  for name in names:
    layer, part = parse_name(name)
    if layer is not None and begin <= layer < begin + share:
      found.append(f"layers/{layer - begin}/{part}")
  return tuple(sorted(found))


def dimension_sizes(config: ModelConfig) -> dict[str, int]:
  """Returns {dimension: size} for all dimensions of parameters."""
  return {
    "vocab": config.vocab_size,
    "positions": config.sequence_length,
    "d_model": config.d_model,
    "heads": config.num_heads,
    "kv_heads": config.key_heads,
    "d_kv": config.d_kv,
    "d_ff": config.d_ff,
    "d_expert": config.expert_size,
    "d_shared": (config.shared_experts or 0) * config.expert_size,
    "experts": config.num_experts or 0,
    "router": config.num_experts or 0,
    "buckets": NUM_BUCKETS,
    "rank": config.adapter_rank or 0,
    "virtual": config.adapter_length or 0,
  }


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
  """Returns {name of a parameter: shape}, in the order of creation."""
  sizes = dimension_sizes(config)
  return {
    name: tuple(sizes[dim] for dim in dims)
    for name, dims in parameter_dims(config).items()
  }


class DistinctParameter(NamedTuple):
  """A parameter that stands for those of all layers of a kind."""

  name: str  # in the first of these layers
  dims: Dims
  shape: tuple[int, ...]
  count: int  # number of these layers; 1 outside the layers


@functools.lru_cache(maxsize=64)  # because a search over layouts calls it often
def distinct_parameters(config: ModelConfig) -> tuple[DistinctParameter, ...]:
  """Returns parameters for sums over all layers, in the order of creation."""
  kinds, sizes = model_of(config).kinds, dimension_sizes(config)
  counts: dict[int | None, int] = {None: 1} | {x.first: x.count for x in kinds}
  found = _dims_of(config, {x.first: x.layer for x in kinds})
  return tuple(
    DistinctParameter(
      *(name, dims, tuple(sizes[x] for x in dims)),
      count=counts[parse_name(name).layer],
    )
    for name, dims in found.items()
  )


def parameter_dims(config: ModelConfig) -> dict[str, Dims]:
  """Returns {name of a parameter: its dimensions}, in the order of creation."""
  return _dims_of(config, dict(enumerate(model_of(config).layers)))


def _dims_of(
  config: ModelConfig, layers: Mapping[int, Layer]
) -> dict[str, Dims]:
  """Returns `parameter_dims` of a model with only `layers`, by number."""
  dims: dict[str, Dims] = {"embedding": ("vocab", "d_model")}
  if config.adapter == "prompt":
    dims[PROMPT] = ("virtual", "d_model")
  if config.positions == "learned":
    dims["position_embedding"] = ("positions", "d_model")
  for i, layer in layers.items():
    for name, layer_dims in dims_in_layer(config, layer).items():
      dims[f"{layer_name(i)}/{name}"] = layer_dims
  if config.final_norm_scale == "learned":
    dims |= _norm_dims(config, "final_norm")
  if config.output_embedding == "separate":
    dims["output_embedding"] = ("vocab", "d_model")
  if "logits" in config.bias_places:
    dims["logits/bias"] = ("vocab",)
  return dims


def logits_table(config: ModelConfig) -> str:
  """Returns the name of the table that makes logits (OUTPUT_EMBEDDING)."""
  return {"tied": "embedding", "separate": "output_embedding"}[
    config.output_embedding
  ]


def _norm_dims(config: ModelConfig, name: str) -> dict[str, Dims]:
  vectors = ["scale", "bias"] if NORMS[config.norm].has_bias else ["scale"]
  return {f"{name}/{vector}": ("d_model",) for vector in vectors}


def dims_in_layer(config: ModelConfig, layer: Layer) -> dict[str, Dims]:
  """Returns {name in the layer: dimensions} of a layer's parameters."""
  dims: dict[str, Dims] = {}
  for prefix, each in layer.all_sums:
    own = {}
    for read in each.reads:
      own |= _norm_dims(config, read.norm)
      for branch in read.branches:
        own |= _dims_in_branch(config, branch)
    dims |= {prefix + name: x for name, x in own.items()}
  return dims


def _dims_in_branch(config: ModelConfig, branch: Branch) -> dict[str, Dims]:
  dims: dict[str, Dims] = {}
  for each in (*branch.inputs, branch.output):
    dims[each.part] = (*each.inputs, *each.outputs)
    dims |= each.factors | each.vectors | each.virtual
  if isinstance(branch.mixer, Attention):
    dims |= branch.mixer.extras
  if isinstance(branch.mixer, Experts):
    dims |= dict.fromkeys(branch.mixer.states, ("router",))
  if branch.output_norm:
    dims |= _norm_dims(config, branch.output_norm)
  return dims


def count_parameters(config: ModelConfig) -> int:
  """Counts parameters as Table 1 of PaLM does, without norm scales.

  States of routers do not count either.
  """
  return sum(
    math.prod(x.shape) * x.count
    for x in distinct_parameters(config)
    if not parse_name(x.name).is_scale and not parse_name(x.name).is_state
  )
