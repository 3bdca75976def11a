# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The architecture of the model."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from palm_mtf.config.checked import (
  Checked,
  Count,
  real,
  text_or_empty,
  texts,
  whole,
)
from palm_mtf.config.layer_pattern import repeat_pattern
from palm_mtf.config.macros import values_of
from palm_mtf.errors import UserError, did_you_mean, shorten

# Layers are limited, because each layer has its own nodes in the graph. Sizes
# are limited to the whole numbers that float32 represents exactly, because
# rotary embedding computes with positions in float32.
MAX_LAYERS, MAX_SIZE, MAX_EXPERTS = 10_000, 2**24, 4096
Size = Annotated[int, whole(maximum=MAX_SIZE)]

# Places of BIASES: a bias is added to q, k and v; to the product of o; to the
# products of the MLP's kernels; and to the logits.
BIAS_PLACES = ("qkv", "o", "mlp", "logits")

# The settings that each ROTARY_SCALING needs. All may have those in _ROTARY,
# too, and "yarn" may have those in _YARN.
_WANTED = {
  "none": "",
  "linear": "ROTARY_FACTOR",
  "llama3": "ROTARY_FACTOR ROTARY_ORIGINAL_LENGTH ROTARY_SLOW ROTARY_FAST",
  "yarn": "ROTARY_FACTOR ROTARY_ORIGINAL_LENGTH",
}
_ROTARY = "ROTARY_FRACTION ROTARY_PAIRS ROTARY_BASE ROTARY_SCALING"
_YARN = "ROTARY_SLOW ROTARY_FAST ROTARY_TRUNCATE ROTARY_ATTENTION_FACTOR"

# The settings that VARIANTS may change: those that change how positions see one
# another, and the kind of MLP.
_VARYING = (
  "ATTENTION_WINDOW MLP POSITIONS ROTARY_FACTOR ROTARY_ORIGINAL_LENGTH "
  f"{_ROTARY} {_YARN} NEIGHBOURS"
).split()

DenseMlp = Literal[
  "swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu", "relu2"
]
# Settings that only layers with MLP = "experts" have.
_OF_EXPERTS = (
  "num_experts experts_per_token expert_mlp d_expert shared_experts router "
  "router_normalizes router_scale router_bias capacity_factor"
).split()
# {setting that only an adapter has: its default}
_OF_ADAPTERS: dict[str, Any] = {
  "adapter_rank": None,
  "adapter_alpha": None,
  "adapter_scale": "rank",
  "adapter_targets": (),
  "adapter_length": None,
}
_LOW_RANK = "adapter_rank adapter_alpha adapter_scale adapter_targets".split()
# {value of ADAPTER: the settings in _OF_ADAPTERS that it has}. It needs those
# whose default is None.
_OF_ADAPTER = {
  "none": [],
  "lora": _LOW_RANK,
  "dora": _LOW_RANK,
  "prefix": ["adapter_length"],
  "prompt": ["adapter_length"],
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Checked):
  """The architecture (section 2 of the PaLM paper; sizes in its Table 1).

  Attributes:
    num_layers: number of Transformer blocks.
    layers: pattern of layers that differ, such as "5*window, global", repeated
      for all layers (config/layer_pattern.py); "" if all layers are alike.
    variants: {name in `layers`: {macro: value}} of the settings in which such
      layers differ from the model's, such as {"global": {},
      "window": {"ATTENTION_WINDOW": 512}}; None if all layers are alike.
    d_model: width of the residual stream.
    num_heads: query heads; num_heads * d_kv may differ from d_model.
    d_kv: width of one head, 256 in PaLM.
    d_ff: hidden width of the MLP, 4 * d_model in PaLM.
    vocab_size: rows of the embedding.
    sequence_length: tokens in one sequence.
    norm: "layer_norm" (no bias), "layer_norm_bias", "rms_norm", or
      "rms_norm_1p", which multiplies by 1 + scale (Gemma).
    norm_epsilon: number that a norm adds to the variance or mean square.
    block: "parallel", x + MLP(norm(x)) + Attention(norm(x));
      "parallel_two_norms", the same with a norm per branch (GPT-NeoX); or
      "serial", h + MLP(mlp_norm(h)) with h = x + Attention(norm(x)).
    branch_norm: whether NORM also normalizes the results of attention and MLP
      before they are added, in a serial block (Gemma 3).
    attention: "multi_query" (one key and value head), "multi_head", or
      "grouped_query" (Ainslie et al. 2023): NUM_KV_HEADS key and value heads,
      each for NUM_HEADS / NUM_KV_HEADS query heads.
    num_kv_heads: key and value heads of "grouped_query"; None otherwise.
    attention_window: number of positions that a position attends to, itself
      included (Mistral); None for all earlier positions.
    qk_norm: norm of q and k, before rotary embedding: "none"; "rms_norm" (Qwen
      3) or "rms_norm_1p" (Gemma 3), of each head, with one scale [d_kv] for q
      and one for k; or "rms_norm_all_heads" (OLMoE), of all heads of q together
      and of all heads of k, with scales [heads, d_kv].
    score_scale: factor of the products of q and k; None for 1 / sqrt(D_KV).
    positions: how attention knows positions. "rotary" rotates q and k (Su et
      al. 2021); "learned" adds a vector per position to the embedding (GPT-2);
      "t5" adds to scores a number per head and bucket of distances (Raffel et
      al. 2020), "alibi" a multiple of the distance (Press et al. 2022), and
      "transformer_xl" a product with a vector per distance (Dai et al. 2019);
      "none" uses only the causal mask.
    rotary_fraction: share of a head's elements, from the first, that rotate.
    rotary_pairs: which elements of a head rotate together: "halves", (i, i + n
      / 2) of n rotated elements, or "neighbours", (2 i, 2 i + 1).
    rotary_base: base of the geometric series of rotary wavelengths.
    rotary_scaling: how frequencies of "rotary" are divided for longer contexts:
      "none"; "linear", all by ROTARY_FACTOR (Chen et al. 2023); or, only low
      ones, "llama3" (Llama 3.1) or "yarn" (Peng et al. 2023).
    rotary_factor: number that divides the lowest frequencies.
    rotary_original_length: SEQUENCE_LENGTH before the context was extended.
    rotary_slow, rotary_fast: numbers of rotations of a pair within the original
      length. Below rotary_slow, a frequency is divided by the whole factor;
      above rotary_fast, it is kept. None for 1 and 32, in "yarn" only.
    rotary_truncate: whether "yarn" rounds the pair indices of these limits.
    rotary_attention_factor: factor of rotated q and k in "yarn"; None for
      0.1 ln(ROTARY_FACTOR) + 1.
    mlp: "swiglu", "geglu" or "geglu_tanh", (f(x wi_gate) * (x wi)) wo with f =
      swish, GELU or its tanh approximation; "gelu", "gelu_tanh", "relu" or
      "relu2" (relu squared), f(x wi) wo; or "experts", several MLPs, of which
      each token uses some (Shazeer et al. 2017).
    num_experts: number of MLPs of "experts"; None if no layer has experts.
    experts_per_token: number of experts that a token uses: those with its
      highest scores or, of experts with equal scores, the lower number. None
      if no layer has experts.
    expert_mlp: the MLP of an expert: any other value of MLP.
    d_expert: hidden width of an expert; None for D_FF.
    shared_experts: number of experts that all tokens use, besides the others;
      they are one MLP of width SHARED_EXPERTS * D_EXPERT (DeepSeek-V3). None
      for none.
    router: how the products of a token and the router's kernel, one per expert,
      become scores: "softmax" over all experts, or "sigmoid" (DeepSeek-V3).
    router_normalizes: whether a token's scores of its experts are divided by
      their sum. For "softmax" this is the softmax over the chosen experts.
    router_scale: factor of the scores by which results are multiplied.
    router_bias: whether a bias per expert is added to scores, only for the
      choice. Training moves the bias by the load of the expert
      (BALANCE_BIAS_RATE); only for "sigmoid" (DeepSeek-V3).
    capacity_factor: an expert takes at most CAPACITY_FACTOR *
      EXPERTS_PER_TOKEN / NUM_EXPERTS of the tokens of a sequence, rounded up:
      first choices before second ones, then earlier tokens before later ones.
      The other tokens get nothing from this expert. None for no limit, as
      always in decoding.
    biases: places that have biases, separated by commas, such as "qkv,mlp":
      "qkv", "o", "mlp" and "logits"; "" for none.
    output_embedding: kernel of the logits: "tied", the transposed embedding, or
      "separate", a second table.
    embedding_scale: factor of the embedding's output.
    logits_scale: factor of the logits; None for 1 / sqrt(D_MODEL), as in PaLM.
    activation_dtype: "bfloat16", "float32", or "auto", which a command resolves
      to the dtype that the machine multiplies natively
      (machine/activation_dtype.py); master weights, norms, softmax, rotary
      tables and the loss are always float32.
    logits_dtype: "float32": logits are not rounded, as in Google's published
      code. "activation": logits are rounded to the activation dtype.
    final_norm_scale: scale of the last norm, "learned", or "none", as in
      Google's published inference code. The paper does not say which.
    output_fan_in: fan-in with which the kernels o and wo are initialized.
      "separate": each kernel's number of inputs. "joined": the sum of both
      numbers, as in Google's published code, which holds both kernels of a
      parallel block in one matrix.
    remat: activations that the backward pass recomputes to save memory: "none",
      "attention" (only attention weights) or "layer" (all activations of a
      layer). The result has the same bits in all three cases.
    model_function: function that makes the model in place of PaLM's block, as
      "module.name", such as "palm_mtf.unitransformer.bitransformer" (T5); ""
      for PaLM's block. The settings above then do what the gin file of the
      model does with them (programs/model_loss.py).
    objective: what training predicts: "causal", each token from the tokens
      before it; "prefix_lm", the rest of a document from its start; or
      "span_corruption", removed spans from the rest of the document. With the
      last two, inputs attend to one another in both directions
      (data/batches/packing.py).
    neighbours: number of neighbours of each chunk of a row that a layer attends
      to, each two chunks long (model/neighbours.py); 0 for none.
    chunk_length: tokens of a chunk.
    adapter: what is trained in place of INIT_CHECKPOINT, whose model is frozen:
      "none"; "lora" (Hu et al. 2022) or "dora" (Liu et al. 2024), two
      factors per kernel; "prefix" (Li and Liang 2021), keys and values of
      virtual positions in each layer; or "prompt" (Lester et al. 2021), their
      embeddings (architecture/adapter.py).
    adapter_rank: the number of columns of the first factor, and of rows of the
      second.
    adapter_alpha: the product of the factors is multiplied by ADAPTER_ALPHA /
      ADAPTER_RANK.
    adapter_scale: "rank", as above; or "sqrt_rank", which divides by the square
      root of ADAPTER_RANK (rank-stabilized: Kalajdzievski 2023).
    adapter_targets: patterns of the kernels' names in a layer, such as
      "attention/*" or "mlp/wi"; [] for all kernels but those of experts.
    adapter_length: the number of virtual positions before each document, which
      count among those of SEQUENCE_LENGTH.
  """

  num_layers: Annotated[int, whole(maximum=MAX_LAYERS)]
  layers: Annotated[
    str, text_or_empty('a text, such as "5*window, global", or ""')
  ] = ""
  # A dictionary has no hash; configurations that differ only here are still
  # compared, and unequal.
  variants: Mapping[str, Mapping[str, Any]] | None = dataclasses.field(
    default=None, hash=False
  )
  d_model: Size
  num_heads: Size
  d_kv: Size
  d_ff: Size
  vocab_size: Size
  sequence_length: Size
  norm: Literal["layer_norm", "layer_norm_bias", "rms_norm", "rms_norm_1p"] = (
    "layer_norm"
  )
  norm_epsilon: Annotated[float, real(1e-12, 1e-1)] = 1e-6
  block: Literal["parallel", "parallel_two_norms", "serial"] = "parallel"
  branch_norm: bool = False
  attention: Literal["multi_query", "multi_head", "grouped_query"] = (
    "multi_query"
  )
  num_kv_heads: Count | None = None
  attention_window: Size | None = None
  qk_norm: Literal["none", "rms_norm", "rms_norm_1p", "rms_norm_all_heads"] = (
    "none"
  )
  score_scale: Annotated[
    float | None, real(1e-6, 1e6, "for 1 / sqrt(D_KV)")
  ] = None
  positions: Literal[
    "rotary", "learned", "t5", "transformer_xl", "alibi", "none"
  ] = "rotary"
  rotary_fraction: Annotated[float, real(0.0, 1.0)] = 1.0
  rotary_pairs: Literal["halves", "neighbours"] = "halves"
  rotary_base: Annotated[float, real(1.0, 1e12)] = 10_000.0
  rotary_scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
  rotary_factor: Annotated[float | None, real(1.0, 1e6)] = None
  rotary_original_length: Size | None = None
  rotary_slow: Annotated[float | None, real(1e-6, 1e6)] = None
  rotary_fast: Annotated[float | None, real(1e-6, 1e6)] = None
  rotary_truncate: bool = True
  rotary_attention_factor: Annotated[float | None, real(1e-6, 1e6)] = None
  mlp: Literal[
    "swiglu",
    "geglu",
    "geglu_tanh",
    "gelu",
    "gelu_tanh",
    "relu",
    "relu2",
    "experts",
  ] = "swiglu"
  num_experts: Annotated[int | None, whole(maximum=MAX_EXPERTS)] = None
  experts_per_token: Annotated[int | None, whole(maximum=MAX_EXPERTS)] = None
  expert_mlp: DenseMlp = "swiglu"
  d_expert: Size | None = None
  shared_experts: Count | None = None
  router: Literal["softmax", "sigmoid"] = "softmax"
  router_normalizes: bool = True
  router_scale: Annotated[float, real(1e-3, 1e3)] = 1.0
  router_bias: bool = False
  capacity_factor: Annotated[float | None, real(1e-3, 1e6)] = None
  biases: Annotated[str, text_or_empty('a text, such as "qkv,o"')] = ""
  output_embedding: Literal["tied", "separate"] = "tied"
  embedding_scale: Annotated[float, real(1e-6, 1e6)] = 1.0
  logits_scale: Annotated[
    float | None, real(1e-6, 1e6, "for 1 / sqrt(D_MODEL)")
  ] = None
  activation_dtype: Literal["auto", "bfloat16", "float32"] = "bfloat16"
  logits_dtype: Literal["float32", "activation"] = "float32"
  final_norm_scale: Literal["learned", "none"] = "learned"
  output_fan_in: Literal["separate", "joined"] = "separate"
  remat: Literal["none", "attention", "layer"] = "none"
  model_function: Annotated[str, text_or_empty('"module.name", or ""')] = ""
  objective: Literal["causal", "prefix_lm", "span_corruption"] = "causal"
  neighbours: Annotated[int, whole(0, 64)] = 0
  chunk_length: Size = 64
  adapter: Literal["none", "lora", "dora", "prefix", "prompt"] = "none"
  adapter_rank: Size | None = None
  adapter_alpha: Annotated[float | None, real(1e-6, 1e6)] = None
  adapter_scale: Literal["rank", "sqrt_rank"] = "rank"
  adapter_targets: Annotated[
    list[str] | tuple[str, ...], texts("patterns of names of kernels")
  ] = ()
  adapter_length: Size | None = None

  def __post_init__(self) -> None:
    super().__post_init__()
    object.__setattr__(self, "adapter_targets", tuple(self.adapter_targets))
    self._check_adapter()
    heads = self.num_kv_heads
    if self.attention != "grouped_query":
      if heads is not None:
        raise UserError(
          f"NUM_KV_HEADS = {heads} and ATTENTION = {self.attention!r}: only "
          '"grouped_query" has this setting; set NUM_KV_HEADS = None, or '
          'ATTENTION = "grouped_query".'
        )
    elif heads is None or self.num_heads % heads:
      raise UserError(
        f'NUM_KV_HEADS = {heads} and ATTENTION = "grouped_query": give a '
        f"divisor of NUM_HEADS = {self.num_heads}."
      )
    if self.attention_window and self.has_prefix:
      raise UserError(
        f"ATTENTION_WINDOW = {self.attention_window} and OBJECTIVE = "
        f"{self.objective!r}: all positions see all inputs, which a window "
        "would hide; set ATTENTION_WINDOW = None."
      )
    self._check_rotary()
    for place in self.bias_places:
      if place not in BIAS_PLACES or self.bias_places.count(place) > 1:
        raise UserError(
          f'BIASES = {self.biases!r}: no place "{place}", or twice'
          f"{did_you_mean(place, BIAS_PLACES)}. Places: "
          f"{', '.join(BIAS_PLACES)}."
        )
    if self.output_fan_in == "joined" and self.block == "serial":
      raise UserError(
        'OUTPUT_FAN_IN = "joined" and BLOCK = "serial": a serial block never '
        'adds the products of o and wo; set OUTPUT_FAN_IN = "separate", or '
        "another BLOCK."
      )
    if self.branch_norm and self.block != "serial":
      raise UserError(
        f"BRANCH_NORM = True and BLOCK = {self.block!r}: only a serial block "
        "adds the results of attention and MLP one by one; set BRANCH_NORM = "
        'False, or BLOCK = "serial".'
      )
    self._check_layers()
    self._check_experts()

  def _check_adapter(self) -> None:
    kind, own = self.adapter, _OF_ADAPTER[self.adapter]
    for name, default in _OF_ADAPTERS.items():
      if name not in own and (value := getattr(self, name)) != default:
        kinds = [x for x, names in _OF_ADAPTER.items() if name in names]
        raise UserError(
          f"{name.upper()} = {value!r} and ADAPTER = {kind!r}: only "
          f"{' and '.join(kinds)} have this setting; leave it out, or set "
          f'ADAPTER = "{kinds[0]}".'
        )
    needed = [x.upper() for x in own if _OF_ADAPTERS[x] is None]
    for name in needed:
      if getattr(self, name.lower()) is None:
        raise UserError(
          f"ADAPTER = {kind!r}: {name} is missing; give "
          f"{' and '.join(needed)}, whole numbers such as 8."
        )
    if self.text_length < 1:
      raise UserError(
        f"ADAPTER_LENGTH = {self.adapter_length}: leaves no room for a text in "
        f"SEQUENCE_LENGTH = {self.sequence_length}; give a number below that."
      )

  def _check_experts(self) -> None:
    if not self.has_experts:
      for name, default in self._defaults_of_experts.items():
        if (value := getattr(self, name)) != default:
          raise UserError(
            f"{name.upper()} = {value!r} and MLP = {self.mlp!r}: only "
            '"experts" has this setting; leave it out, or set MLP = "experts".'
          )
      return
    count, chosen = self.num_experts, self.experts_per_token
    if count is None or chosen is None:
      missing = "NUM_EXPERTS" if count is None else "EXPERTS_PER_TOKEN"
      raise UserError(f'MLP = "experts": give {missing}, too.')
    if chosen > count:
      raise UserError(
        f"EXPERTS_PER_TOKEN = {chosen} and NUM_EXPERTS = {count}: a token uses "
        f"some of the experts; use at most {count}."
      )
    if self.router_bias and self.router != "sigmoid":
      raise UserError(
        f"ROUTER_BIAS = True and ROUTER = {self.router!r}: the bias balances "
        'scores of "sigmoid"; set ROUTER = "sigmoid", or ROUTER_BIAS = False '
        "and BALANCE_LOSS."
      )
    if "mlp" in self.bias_places:
      raise UserError(
        f'BIASES = {self.biases!r} and MLP = "experts": experts have no '
        'biases; leave out "mlp".'
      )
    if self.output_fan_in == "joined":
      raise UserError(
        'OUTPUT_FAN_IN = "joined" and MLP = "experts": the kernels of experts '
        'are in no matrix with o; set OUTPUT_FAN_IN = "separate".'
      )

  def _check_layers(self) -> None:
    names, variants = self.layers, self.variants
    if variants is None:
      variants = {}
    if not isinstance(variants, Mapping) or not all(
      isinstance(name, str) and isinstance(changed, Mapping)
      for name, changed in variants.items()
    ):
      raise UserError(
        f"VARIANTS = {variants!r}: give settings by name, such as "
        '{"window": {"ATTENTION_WINDOW": 512}, "global": {}}, or None.'
      )
    used = set(self.variant_names)
    for name in sorted(used.difference(variants)):
      raise UserError(
        f"LAYERS = {shorten(names)}: VARIANTS has no {name!r}"
        f"{did_you_mean(name, variants)}; add it."
      )
    for name in variants:
      if name not in used:
        raise UserError(
          f"VARIANTS[{name!r}]: LAYERS = {shorten(names)} does not name it"
          f"{did_you_mean(name, used)}; leave it out, or name it."
        )
      self.variant(name)

  def _check_rotary(self) -> None:
    changed = [
      x.name.upper()
      for x in dataclasses.fields(self)
      if x.name.startswith("rotary_") and getattr(self, x.name) != x.default
    ]
    if self.positions == "rotary":
      size, fraction = self.rotary_size, self.rotary_fraction
      if size % 2 or not size or abs(fraction * self.d_kv - size) > 1e-6:
        what = "D_KV" if fraction == 1 else "ROTARY_FRACTION * D_KV"
        raise UserError(
          f"{what} = {fraction * self.d_kv:g}: rotary embedding turns pairs of "
          f"numbers, so {what} is even; use {max(2, size + size % 2)}."
        )
      return self._check_scaling(changed)
    for name in changed:
      raise UserError(
        f"{name} = {getattr(self, name.lower())!r} and POSITIONS = "
        f'{self.positions!r}: only "rotary" has this setting; leave it out.'
      )

  def _check_scaling(self, changed: list[str]) -> None:
    kind, length = self.rotary_scaling, self.rotary_original_length
    wanted = _WANTED[kind].split()
    optional = f"{_ROTARY} {_YARN if kind == 'yarn' else ''}".split()
    for name in [x for x in wanted if x not in changed]:
      raise UserError(f"ROTARY_SCALING = {kind!r}: give {name}, too.")
    for name in changed:
      if name not in wanted + optional:
        raise UserError(
          f"{name} = {getattr(self, name.lower())!r} and ROTARY_SCALING = "
          f"{kind!r}: the scaling has no such setting; leave it out."
        )
    if not length:
      return
    slow, fast = self.rotary_slow or 1.0, self.rotary_fast or 32.0
    turns = length / (2 * math.pi)  # first pair's rotations over `length`
    if slow >= (min(fast, turns) if kind == "yarn" else fast):
      raise UserError(
        f"ROTARY_SLOW = {slow:g}: give a number below ROTARY_FAST = {fast:g} "
        f"and below ROTARY_ORIGINAL_LENGTH / 2 pi = {turns:g}."
      )
    if kind == "yarn" and self.rotary_base**2 <= max(1.0, turns / fast):
      raise UserError(
        f"ROTARY_BASE = {self.rotary_base:g}: all pairs of numbers turn more "
        f"than ROTARY_FAST = {fast:g} times; use a larger base."
      )

  @property
  def variant_names(self) -> tuple[str, ...]:
    """The name in VARIANTS of each layer; () if all layers are alike."""
    if not self.layers:
      return ()
    return repeat_pattern(self.layers, self.num_layers, MAX_LAYERS)

  def variant(self, name: str) -> "ModelConfig":
    """Returns the settings of the layers that are called `name` in LAYERS.

    Raises:
      UserError: the variant has a setting that is unknown or may not differ.
    """
    changed = (self.variants or {})[name]
    given = f"VARIANTS[{name!r}]"
    for macro in changed:
      if macro not in _VARYING:
        raise UserError(
          f"{given}: {macro!r} cannot differ between layers"
          f"{did_you_mean(str(macro), _VARYING)}; settings that can: "
          f"{', '.join(sorted(_VARYING))}."
        )
    settings = {macro.lower(): value for macro, value in changed.items()}
    if positions := settings.get("positions"):
      for value in (positions, self.positions):
        if value not in ("rotary", "none"):
          raise UserError(
            f"{given} and POSITIONS = {value!r}: between layers, only "
            '"rotary" and "none" can differ; leave the variant\'s out.'
          )
      if positions == "none":  # the model's ROTARY_* mean nothing here
        defaults = {x.name: x.default for x in dataclasses.fields(self)}
        rotary = {x: y for x, y in defaults.items() if x.startswith("rotary_")}
        settings = rotary | settings
    if settings.get("mlp", self.mlp) != "experts":
      settings |= self._defaults_of_experts
    try:
      return dataclasses.replace(self, layers="", variants=None, **settings)
    except UserError as error:
      raise UserError(f"{given}: {error}") from None

  @property
  def _defaults_of_experts(self) -> dict[str, object]:
    return {name: getattr(type(self), name) for name in _OF_EXPERTS}

  @property
  def base(self) -> "ModelConfig":
    """The model without its adapter."""
    if self.adapter == "none":
      return self
    return dataclasses.replace(self, **{"adapter": "none", **_OF_ADAPTERS})

  @property
  def merged(self) -> "ModelConfig":
    """The model whose kernels include the factors of its adapter, if any."""
    return self if self.adapter_length else self.base

  @property
  def text_length(self) -> int:
    """Number of the SEQUENCE_LENGTH positions that hold tokens."""
    return self.sequence_length - (self.adapter_length or 0)

  @property
  def text_room(self) -> str:
    """How messages name `text_length`."""
    less = " - ADAPTER_LENGTH" if self.adapter_length else ""
    return f"SEQUENCE_LENGTH{less} = {self.text_length:,}"

  @property
  def has_experts(self) -> bool:
    """Whether any layer's MLP is "experts"."""
    if not self.layers:
      return self.mlp == "experts"
    variants = (self.variants or {}).values()
    return any(x.get("MLP", self.mlp) == "experts" for x in variants)

  @property
  def expert_size(self) -> int:
    """Hidden width of an expert."""
    return self.d_expert or self.d_ff

  @property
  def bias_places(self) -> tuple[str, ...]:
    """Items of BIAS_PLACES: where the model adds biases."""
    return tuple(self.biases.split(",")) if self.biases else ()

  @property
  def key_heads(self) -> int:
    """Number of heads of keys and values."""
    return {
      "multi_query": 1,
      "multi_head": self.num_heads,
      "grouped_query": self.num_kv_heads or 0,
    }[self.attention]

  @property
  def rotary_size(self) -> int:
    """Number of elements of a head that "rotary" rotates."""
    return round(self.rotary_fraction * self.d_kv)

  @property
  def logits_factor(self) -> float:
    """The value of `logits_scale`; 1 / sqrt(d_model) for None."""
    scale = self.logits_scale
    return self.d_model**-0.5 if scale is None else scale

  @property
  def has_prefix(self) -> bool:
    """Whether inputs of a sequence attend to one another in both directions."""
    return self.objective != "causal"

  def macros(self) -> dict[str, object]:
    """Returns {macro: value} of all settings except ACTIVATION_DTYPE.

    ACTIVATION_DTYPE is omitted, because a checkpoint works with either dtype.
    """
    macros = values_of(self)
    del macros["ACTIVATION_DTYPE"]
    return macros
