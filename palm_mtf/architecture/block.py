# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The block as data: which norms, products and mixers a layer has.

A layer is a list of sums. The branches of a sum read the residual stream, each
through a norm, and the layer adds their results to the stream. By BLOCK, it is:

  parallel             [attention(norm), mlp(norm)]
  parallel_two_norms   [attention(norm), mlp(mlp_norm)]
  serial               [attention(norm)], [mlp(mlp_norm)]

A branch multiplies the result of its norm by some kernels, mixes the products
by attention or by an MLP's activation, and multiplies the result by one more
kernel. A model is a list of groups, each a short list of layers that is
repeated (LAYERS). Other modules derive parameters, FLOPs, memory and
collectives from this description.
"""

import collections
import dataclasses
import fractions
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from palm_mtf.architecture.adapter import (
  MAGNITUDE,
  VIRTUAL,
  A,
  B,
  LowRank,
  is_target,
  low_rank_of,
)
from palm_mtf.architecture.rotary import Rotary, rotary_of
from palm_mtf.config import ModelConfig

Dims = tuple[str, ...]  # names of dimensions, as in `model.dims.Dims`


class NormForm(NamedTuple):
  """What a norm computes; `NORMS` has one for each value of NORM."""

  # "variance": x minus its mean, divided by the square root of the variance.
  # "mean_square": x divided by the square root of its mean square.
  statistic: str
  scale_offset: float = 0.0  # the norm multiplies by the scale plus this
  has_bias: bool = False
  # Whether a norm of q or k has one statistic for all heads of a position.
  joins_heads: bool = False


NORMS = {
  "layer_norm": NormForm("variance"),
  "layer_norm_bias": NormForm("variance", has_bias=True),
  "rms_norm": NormForm("mean_square"),
  "rms_norm_1p": NormForm("mean_square", scale_offset=1.0),
}

# {value of QK_NORM: what the norms of q and k compute; None for no norms}
QK_NORMS = {
  "none": None,
  "rms_norm": NORMS["rms_norm"],
  "rms_norm_1p": NORMS["rms_norm_1p"],
  "rms_norm_all_heads": NormForm("mean_square", joins_heads=True),
}

# {value of MLP: (activation, names of the kernels after the norm)}. If there
# are two, the activation of the first product multiplies the second product.
_GATED, _PLAIN = ("wi_gate", "wi"), ("wi",)
MLPS = {
  "swiglu": ("swish", _GATED),
  "geglu": ("gelu", _GATED),
  "geglu_tanh": ("gelu_tanh", _GATED),
  "gelu": ("gelu", _PLAIN),
  "gelu_tanh": ("gelu_tanh", _PLAIN),
  "relu": ("relu", _PLAIN),
  "relu2": ("relu2", _PLAIN),
}


class Projection(NamedTuple):
  """A product with one kernel of a layer, then its bias, norm and rotation."""

  part: str  # name of the kernel within the layer, such as "attention/q"
  inputs: Dims  # dimensions of the kernel that the product sums over
  outputs: Dims  # dimensions of the kernel that the product keeps
  has_bias: bool = False
  head_norm: NormForm | None = None  # of the product's heads; None for no norm
  rotary: Rotary | None = None  # None for no rotation
  positions: str = "length"  # dimension of positions in the product
  low_rank: LowRank | None = (
    None  # how the kernel is adapted; None if it is not
  )
  # Whether an adapter has the products of virtual positions.
  has_virtual: bool = False

  @property
  def factors(self) -> dict[str, Dims]:
    """{name within the layer: dimensions} of the factors A and B, if any."""
    if not self.low_rank:
      return {}
    return {
      f"{self.part}{A}": (*self.inputs, "rank"),
      f"{self.part}{B}": ("rank", *self.outputs),
    }

  @property
  def virtual(self) -> dict[str, Dims]:
    """{name within the layer: dimensions} of virtual positions' products."""
    if not self.has_virtual:
      return {}
    return {f"{self.part}{VIRTUAL}": ("virtual", *self.outputs)}

  @property
  def magnitude(self) -> str:
    """Name within the layer of the magnitude of an adapted kernel."""
    return f"{self.part}{MAGNITUDE}"

  @property
  def bias(self) -> str:
    """Name of the bias within the layer."""
    return f"{self.part}_bias"

  @property
  def norm_scale(self) -> str:
    """Name of the scale of `head_norm` within the layer."""
    return f"{self.part}_norm/scale"

  @property
  def vectors(self) -> dict[str, Dims]:
    """{name within the layer: dimensions} of what the product is changed by.

    In order: the adapter's magnitude, the bias, and the scale of the norm.
    """
    found = {}
    if self.low_rank and self.low_rank.has_magnitude:
      found[self.magnitude] = self.outputs
    if self.has_bias:
      found[self.bias] = self.outputs
    if form := self.head_norm:
      own = self.outputs if form.joins_heads else self.outputs[-1:]
      found[self.norm_scale] = own
    return found


@dataclasses.dataclass(frozen=True)
class Attention:
  """How attention mixes q, k and v."""

  # Value of POSITIONS if it changes scores, such as "t5"; else None.
  score_positions: str | None = None
  # (name within the layer, dimensions) of parameters for scores.
  extras: tuple[tuple[str, Dims], ...] = ()
  # Number of positions that a position sees, with itself; None for no limit.
  window: int | None = None
  # Factor of the products of q and k; None for 1 / sqrt(d_kv).
  scale: float | None = None

  def factor(self, d_kv: int) -> float:
    """Returns the factor of the products of q and k, `d_kv` numbers each."""
    return d_kv**-0.5 if self.scale is None else self.scale


PLAIN_ATTENTION = Attention()


@dataclasses.dataclass(frozen=True)
class Mlp:
  """How an MLP computes its hidden layer from its products (see MLPS)."""

  activation: str
  is_gated: bool


@dataclasses.dataclass(frozen=True)
class Experts:
  """Which of several MLPs compute a token's result, and what they compute.

  Each token has a score per expert, and uses the experts with the highest
  scores. The result is the sum of these experts' results, each multiplied by
  the token's score of the expert.
  """

  mlp: Mlp  # what an expert computes
  count: int  # number of experts
  per_token: int  # number of experts that a token uses
  router: str  # "softmax" or "sigmoid": how products become scores
  # Whether the scores of a token's experts are divided by their sum.
  normalizes: bool
  scale: float  # factor of the scores
  # Whether a bias per expert is added to the scores for the choice.
  has_bias: bool
  capacity_factor: float | None  # CAPACITY_FACTOR

  @property
  def states(self) -> tuple[str, ...]:
    """Names in the layer of the parameters that follow the experts' loads."""
    return (LOAD, ROUTER_BIAS) if self.has_bias else (LOAD,)

  def capacity(self, length: int) -> int:
    """Returns how many of the `length` tokens of a sequence an expert takes."""
    if self.capacity_factor is None:
      return length
    # As a fraction, because 1.1 in binary would round 55 up to 56.
    factor = fractions.Fraction(str(self.capacity_factor))
    places = factor * length * self.per_token / self.count
    return min(length, math.ceil(places))


# Names in a layer of the parameters of the router of `Experts`: its kernel; the
# share of the last step's choices that each expert got; and the bias.
ROUTER, LOAD, ROUTER_BIAS = "mlp/router", "mlp/router_load", "mlp/router_bias"


@dataclasses.dataclass(frozen=True)
class Branch:
  """One branch of a layer."""

  # Products of a norm: q, k and v; one or two products of an MLP; or the
  # router's product, then those of all experts.
  inputs: tuple[Projection, ...]
  # Maps these products to the input of `output`.
  mixer: Attention | Mlp | Experts
  output: Projection  # product that is added to the residual stream
  # Name within the layer of the norm of `output` before it is added, if any.
  output_norm: str | None = None

  @property
  def experts(self) -> Experts:
    """The mixer of a branch with experts."""
    assert isinstance(self.mixer, Experts)
    return self.mixer


class Read(NamedTuple):
  """The branches of a sum that read the same norm, by one matrix product."""

  norm: str  # name of the norm within the layer
  branches: tuple[Branch, ...]

  @property
  def joined(self) -> tuple[Branch, ...]:
    """The branches without `Experts`, whose kernels one product joins."""
    return tuple(x for x in self.branches if not isinstance(x.mixer, Experts))

  @property
  def sparse(self) -> Branch | None:
    """The branch with `Experts`, if any."""
    found = (x for x in self.branches if isinstance(x.mixer, Experts))
    return next(found, None)

  @property
  def projections(self) -> tuple[Projection, ...]:
    """The products of the norm's result with the kernels of `joined`."""
    return tuple(x for branch in self.joined for x in branch.inputs)

  @property
  def parts(self) -> tuple[str, ...]:
    """Names in the layer of the kernels, which one matrix product joins."""
    return tuple(x.part for x in self.projections)


class Sum(NamedTuple):
  """Branches that read the same residual stream, then add their results."""

  reads: tuple[Read, ...]

  @property
  def branches(self) -> tuple[Branch, ...]:
    """The branches of all `reads`."""
    return tuple(x for read in self.reads for x in read.branches)

  @property
  def outputs(self) -> tuple[str, ...]:
    """Names in the layer of the kernels whose products are the results.

    The kernels of experts are not among them.
    """
    joined = (x for read in self.reads for x in read.joined)
    return tuple(dict.fromkeys(x.output.part for x in joined))

  @property
  def output_norm(self) -> str | None:
    """Name in the layer of the norm of the results; None for no norm."""
    (found,) = {x.output_norm for x in self.branches}
    return found


ENCODER = "encoder"  # begins the names of `Layer.encoder` in the layer


class Layer(NamedTuple):
  """A layer: sums that are added to the residual stream one after another."""

  sums: tuple[Sum, ...]
  # With NEIGHBOURS: what encodes them, and both cross-attentions, with reads
  # of what attends, and of what it attends to (model/neighbours.py).
  encoder: tuple[Sum, ...] = ()
  crosses: tuple[Sum, ...] = ()

  @property
  def all_sums(self) -> list[tuple[str, Sum]]:
    """All sums, each with what begins the names of its parameters."""
    own = [("", x) for x in self.sums + self.crosses]
    return own + [(f"{ENCODER}/", x) for x in self.encoder]

  @property
  def reads(self) -> tuple[Read, ...]:
    """The `Read`s of all sums, in order."""
    return tuple(x for each in self.sums for x in each.reads)

  @property
  def branches(self) -> tuple[Branch, ...]:
    """The branches of all sums, in order."""
    return tuple(x for each in self.sums for x in each.branches)

  @property
  def projections(self) -> tuple[Projection, ...]:
    """All products, in the order in which their parameters are created."""
    return tuple(
      x for each in self.branches for x in (*each.inputs, each.output)
    )

  @property
  def attention(self) -> Branch:
    """The attention branch."""
    (found,) = (x for x in self.branches if isinstance(x.mixer, Attention))
    return found

  @property
  def sparse(self) -> Branch | None:
    """The branch with `Experts`, if any."""
    return next(filter(None, (x.sparse for x in self.reads)), None)

  @property
  def rotary(self) -> Rotary | None:
    """How positions rotate q and k; None if they do not."""
    return self.attention.inputs[0].rotary


class Kind(NamedTuple):
  """Layers of a model that are alike."""

  layer: Layer
  first: int  # number of the first of these layers
  count: int


class Group(NamedTuple):
  """Layers that follow one another: `period`, repeated `count` times."""

  period: tuple[Layer, ...]
  count: int


class Model(NamedTuple):
  """The layers of a model, as groups in the order of the layers."""

  groups: tuple[Group, ...]

  @property
  def layers(self) -> tuple[Layer, ...]:
    """Every layer, in order."""
    return tuple(x for each in self.groups for x in each.period * each.count)

  @property
  def experts(self) -> Experts | None:
    """The experts, which are alike in all layers that have any."""
    found = (x.sparse.experts for x in self.layers if x.sparse)
    return next(found, None)

  @property
  def kinds(self) -> tuple[Kind, ...]:
    """The different layers, in order of their first occurrence."""
    firsts: dict[Layer, int] = {}
    counts: collections.Counter[Layer] = collections.Counter()
    begin = 0
    for period, count in self.groups:
      for i, layer in enumerate(period, begin):
        firsts.setdefault(layer, i)
        counts[layer] += count
      begin += len(period) * count
    return tuple(Kind(x, firsts[x], n) for x, n in counts.items())

  @property
  def rotaries(self) -> tuple[Rotary, ...]:
    """The ways in which positions rotate q and k, in order of first use."""
    layers = (x for each in self.groups for x in each.period)
    return tuple(dict.fromkeys(x.rotary for x in layers if x.rotary))


@functools.cache  # because a search over layouts makes thousands of calls
def model_of(config: ModelConfig) -> Model:
  """Returns the layers that the settings describe."""
  if not config.layers:
    return Model((Group((_layer(config),), config.num_layers),))
  names = config.variant_names
  found = {name: _layer(config.variant(name)) for name in set(names)}
  return Model(_find_groups([found[name] for name in names]))


def _find_groups(layers: list[Layer]) -> tuple[Group, ...]:
  """Splits layers into groups, from the first, each as long as possible.

  Equal layers make equal groups, whatever their names in LAYERS are. Layers
  that do not repeat are one group each.
  """
  numbers = {layer: i for i, layer in enumerate(dict.fromkeys(layers))}
  kinds = [numbers[layer] for layer in layers]  # which are fast to compare
  groups, first = [], 0
  while first < len(kinds):
    best = 1, 1  # length of the period, and number of repetitions
    for length in range(1, (len(kinds) - first) // 2 + 1):
      end = first + length
      while kinds[end : end + length] == kinds[first : first + length]:
        end += length
      if end - first > max(length, best[0] * best[1]):
        best = length, (end - first) // length
    length, count = best
    groups.append(Group(tuple(layers[first : first + length]), count))
    first += length * count
  return tuple(groups)


def _layer(config: ModelConfig) -> Layer:
  if not config.neighbours:
    return Layer(_sums(config))
  encoder = dataclasses.replace(config, attention_window=None)
  crosses = _cross(config, "condition"), _cross(config, "cross")
  return Layer(_sums(config), _sums(encoder), crosses)


def _cross(config: ModelConfig, name: str) -> Sum:
  mixer, stream = Attention(scale=config.score_scale), ("d_model",)
  memory = stream, _KEY_DIMS[config.attention]
  q, k, v, output = (
    Projection(f"{name}/{part}", *dims)
    for part, dims in zip(
      "qkvo", ((stream, _HEADS), memory, memory, (_HEADS, stream)), strict=True
    )
  )
  reads = ("norm", (q,)), ("memory_norm", (k, v))
  return Sum(
    tuple(Read(f"{name}/{x}", (Branch(y, mixer, output),)) for x, y in reads)
  )


def _sums(config: ModelConfig) -> tuple[Sum, ...]:
  attention = _adapt(config, _attention(config))
  mlps = tuple(_adapt(config, x) for x in _mlps(config))
  if config.block == "parallel":
    return (Sum((Read("norm", (attention, *mlps)),)),)
  reads = Read("norm", (attention,)), Read("mlp_norm", mlps)
  if config.block == "parallel_two_norms":
    return (Sum(reads),)
  return tuple(Sum((read,)) for read in reads)  # BLOCK = "serial"


def _adapt(config: ModelConfig, branch: Branch) -> Branch:
  low_rank = low_rank_of(config)
  if not low_rank or isinstance(branch.mixer, Experts):
    return branch
  *inputs, output = (
    x._replace(low_rank=low_rank) if is_target(config, x.part) else x
    for x in (*branch.inputs, branch.output)
  )
  return dataclasses.replace(branch, inputs=tuple(inputs), output=output)


# {value of ATTENTION: dimensions of k, and of v, at one position}
_KEY_DIMS = {
  "multi_query": ("d_kv",),
  "multi_head": ("heads", "d_kv"),
  "grouped_query": ("kv_heads", "d_kv"),
}
_HEADS = ("heads", "d_kv")
# {value of POSITIONS that changes attention scores: its parameters, in the
# order in which the function `score_by_distance` takes them}
_SCORES: dict[str, dict[str, Dims]] = {
  "alibi": {},
  "t5": {"attention/relative_bias": ("buckets", "heads")},
  "transformer_xl": {
    "attention/content_bias": _HEADS,
    "attention/position_bias": _HEADS,
    "attention/relative": ("d_model", *_HEADS),
  },
}


def _attention(config: ModelConfig) -> Branch:
  def project(name: str, dims: Dims, positions: str, **more) -> Projection:
    part, has_bias = f"attention/{name}", "qkv" in config.bias_places
    return Projection(
      part, ("d_model",), dims, has_bias, positions=positions, **more
    )

  memory, has_prefix = _KEY_DIMS[config.attention], config.adapter == "prefix"
  compared = dict(head_norm=QK_NORMS[config.qk_norm], rotary=rotary_of(config))
  scores = config.positions if config.positions in _SCORES else None
  return Branch(
    inputs=(
      project("q", _HEADS, "length", **compared),
      *(
        project(x, memory, "memory_length", has_virtual=has_prefix, **more)
        for x, more in (("k", compared), ("v", {}))
      ),
    ),
    mixer=Attention(
      score_positions=scores,
      extras=tuple(_SCORES[scores].items()) if scores else (),
      window=config.attention_window,
      scale=config.score_scale,
    ),
    output=Projection(
      "attention/o", _HEADS, ("d_model",), "o" in config.bias_places
    ),
    output_norm="attention_output_norm" if config.branch_norm else None,
  )


def _mlps(config: ModelConfig) -> tuple[Branch, ...]:
  """Returns the MLP; or the shared experts, if any, and the others."""
  if config.mlp != "experts":
    return (_mlp(config, config.mlp, "mlp", ("d_ff",)),)
  kind, found = config.expert_mlp, []
  if config.shared_experts:
    found.append(_mlp(config, kind, "mlp/shared", ("d_shared",)))
  # The experts' kernels are stacked: [experts, d_model, d_expert].
  experts = _mlp(config, kind, "mlp/experts", ("d_expert",), ("experts",))
  router = Projection(ROUTER, ("d_model",), ("router",))
  mixer = Experts(
    mlp=experts.mixer,
    count=config.num_experts,
    per_token=config.experts_per_token,
    router=config.router,
    normalizes=config.router_normalizes,
    scale=config.router_scale,
    has_bias=config.router_bias,
    capacity_factor=config.capacity_factor,
  )
  found.append(
    dataclasses.replace(experts, inputs=(router, *experts.inputs), mixer=mixer)
  )
  return tuple(found)


def _mlp(
  config: ModelConfig, kind: str, name: str, hidden: Dims, stack: Dims = ()
) -> Branch:
  has_bias = "mlp" in config.bias_places
  activation, kernels = MLPS[kind]
  return Branch(
    inputs=tuple(
      Projection(f"{name}/{kernel}", (*stack, "d_model"), hidden, has_bias)
      for kernel in kernels
    ),
    mixer=Mlp(activation, is_gated=kernels == _GATED),
    output=Projection(f"{name}/wo", (*stack, *hidden), ("d_model",), has_bias),
    output_norm="mlp_output_norm" if config.branch_norm else None,
  )


def model_of_layers(config: ModelConfig, layers: Sequence[int]) -> ModelConfig:
  """Returns the settings of a model that has only some layers of `config`."""
  if [*layers] == [*range(config.num_layers)]:
    return config
  names = [config.variant_names[i] for i in layers] if config.layers else []
  return dataclasses.replace(
    config,
    num_layers=len(layers),
    layers=", ".join(names),
    variants={x: config.variants[x] for x in names} or None,
  )
