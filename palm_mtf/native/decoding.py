# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding operations in C++, on one CPU device, and packed weights."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.architecture.block import (
  NORMS,
  Attention,
  Experts,
  Layer,
  Mlp,
  model_of,
)
from palm_mtf.config import ModelConfig
from palm_mtf.config.decode import MOST_GREEDY
from palm_mtf.machine.processors import usable_cores
from palm_mtf.native.build import count_panel_columns
from palm_mtf.native.operations import IS_CENTERED, operations, set_shapes

# Formats of packed weights, in the order of `Format` in panels.h.
INT4 = tf.as_dtype("int4")
BLOCK_FORMATS = ("q4_k", "q5_k", "q6_k")  # types of llama.cpp (blocks.h)
FORMATS = (tf.float32, tf.bfloat16, tf.int8, INT4, *BLOCK_FORMATS)
_BLOCK = 256  # weights per block of a column: kBlock in panels.h
# Numbers before the tokens in a row of `Texts.history`: kCounts in lookup.h.
_COUNTS = 10
MOST_DRAFTED = 8  # tokens per text and step: kMostDrafted in lookup.h
GROUP = 32  # rows per scale in a column of int4 weights [inner, outer]


# Activations of gated MLPs, in the order of `Activation` in activations.h.
ACTIVATIONS = ("swish", "gelu", "gelu_tanh")


def find_missing_in_step(config: ModelConfig) -> str | None:
  """Returns a gin macro, such as NORM, whose value C++ steps lack, or None."""
  norm, layers = NORMS[config.norm], model_of(config).layers
  mlps = {mlp for layer in layers for mlp in _mlps(layer)}
  is_computed = {
    "BLOCK": config.block in ("parallel", "serial"),
    "NORM": norm.statistic in IS_CENTERED and not norm.has_bias,
    "MLP": all(x.is_gated and x.activation in ACTIVATIONS for x in mlps),
    "VARIANTS": len(mlps) == 1,
    "POSITIONS": config.positions in ("rotary", "none"),
    "BIASES": not config.biases,
    # BRANCH_NORM normalizes the sum of shared and chosen experts; the C++ step
    # would normalize each of the two.
    "SHARED_EXPERTS": not (config.shared_experts and config.branch_norm),
  }
  return next((name for name, x in is_computed.items() if not x), None)


def _mlps(layer: Layer) -> list[Mlp]:
  # Returns what the layer's MLPs compute, its experts included.
  mixers = [x.mixer for x in layer.branches]
  return [
    x.mlp if isinstance(x, Experts) else x
    for x in mixers
    if not isinstance(x, Attention)
  ]


NEVER = 2**31 - 1  # more rows than any product has


class Products(NamedTuple):
  """Which executor multiplies by packed kernels: the least rows for each one.

  On CPUs with AMX, tiles can multiply instead of AVX-512. In bfloat16, that
  changes the last bits of a row. So there the number for tiles is 1 or NEVER,
  because then a row's bits do not depend on the number of rows. In int8, no
  choice changes any bit. With the defaults, the CPU's flags choose;
  executors/host/products.py measures better numbers.
  """

  steps: int = 1  # tiles, in decoding steps in bfloat16
  prompts: int = 1  # tiles, in prompts and scored texts in bfloat16
  int8: int = 1  # tiles, in int8
  # oneDNN, with unpacked kernels, in prompts in bfloat16. Bits then depend on
  # the number of rows.
  onednn: int = NEVER

  def tile_rows(self, dtype: tf.DType | str, *, is_step: bool) -> int:
    """Returns the least number of rows that tiles multiply, for `dtype`."""
    if dtype == tf.int8:
      return self.int8
    return self.steps if is_step else self.prompts


BY_FLAGS = Products()


@dataclasses.dataclass(frozen=True)
class PackedKernel:
  """A constant weight matrix [inner, outer], in panels (panels.h).

  A panel has several columns, in the order in which a C++ product reads them.
  The matrices of several experts have their panels one after another.
  """

  panels: tf.Tensor  # [panels, bytes], uint8
  outer: int
  dtype: tf.DType | str  # one of FORMATS
  products: Products = BY_FLAGS


def pack(
  ws: Sequence[tf.Tensor],
  dtype: tf.DType | str,
  *,
  joins_rows: bool = False,
  is_transposed: bool = False,
  is_rounded: bool = False,
) -> PackedKernel:
  """Packs a matrix [inner, outer] part by part, without a joined copy.

  Args:
    ws: parts of the matrix, [inner, outer] float32, joined along `outer`; or of
      the matrices of all experts, [experts, inner, outer].
    dtype: one of FORMATS. int8 has one scale per column; int4 has one scale per
      GROUP rows of a column; the last three are those of llama.cpp.
    joins_rows: whether the parts are joined along `inner` instead.
    is_transposed: whether each part is [outer, inner].
    is_rounded: whether numbers are rounded to bfloat16 before packing.
  """
  stack = ws[0].shape[0] if ws[0].shape.rank == 3 else 1
  shapes = [w.shape[-2:] for w in ws]
  parts = [x[::-1] if is_transposed else x for x in shapes]
  inners, outers = ([int(x) for x in some] for some in zip(*parts, strict=True))
  inner = sum(inners) if joins_rows else inners[0]
  outer = outers[0] if joins_rows else sum(outers)
  panels = operations().palm_pack(
    ws=[_join_experts(w) for w in ws],
    stack=stack,
    format=FORMATS.index(dtype),
    joins_rows=joins_rows,
    is_transposed=is_transposed,
    is_rounded=is_rounded,
    threads=usable_cores(),
  )
  columns = count_panel_columns()
  panels.set_shape(
    [stack * -(-outer // columns), _count_panel_bytes(dtype, inner, columns)]
  )
  return PackedKernel(panels, outer, dtype)


def _join_experts(w):
  # Returns [experts * inner, outer]. A reshape of a matrix would add two nodes.
  return tf.reshape(w, [-1, w.shape[-1]]) if w.shape.rank == 3 else w


def unpack(kernel: PackedKernel, inner: int) -> tf.Tensor:
  """Returns the matrix [inner, outer] of a kernel whose dtype is bfloat16."""
  w = operations().palm_unpack(
    kernel=kernel.panels,
    T=kernel.dtype,
    inner=inner,
    outer=kernel.outer,
    threads=usable_cores(),
  )
  w.set_shape([inner, kernel.outer])
  return w


def _count_panel_bytes(dtype, inner, columns):
  # Computes what panel_bytes (panels.h) computes, to set a static shape.
  count = -(-inner // GROUP) * GROUP * columns
  if dtype == INT4:
    return count // 2 + count // GROUP * 2
  if dtype in BLOCK_FORMATS:
    more = BLOCK_FORMATS.index(dtype)
    blocks = -(-inner // _BLOCK) * 8 * columns
    return count // GROUP * (GROUP // 2 + GROUP // 8 * more + 2) + blocks
  return count * dtype.size + (8 * columns if dtype == tf.int8 else 0)


# Minimum number of a kernel's bytes per thread. A thread reads these bytes in 5
# microseconds, so that synchronizing threads, up to 1 microsecond, costs less.
_BYTES_FOR_A_THREAD = 250_000


def multiply(
  xs: Sequence[tf.Tensor],
  kernel: PackedKernel,
  dtype: tf.DType,
  *,
  is_step: bool,
) -> tf.Tensor:
  """Multiplies rows by a packed kernel [inner, outer]; returns [rows, outer].

  `xs` are parts of the rows [rows, inner], cut along `inner`, in float32 or
  bfloat16. `dtype`, the product's, is also float32 or bfloat16; it may differ.
  """
  y = operations().palm_product(
    xs=list(xs),
    kernel=kernel.panels,
    Tout=dtype,
    outer=kernel.outer,
    format=FORMATS.index(kernel.dtype),
    tile_rows=kernel.products.tile_rows(kernel.dtype, is_step=is_step),
    threads=count_threads([kernel]),
  )
  y.set_shape([xs[0].shape[0], kernel.outer])
  return y


def sum_experts(
  x: tf.Tensor,
  gates: tf.Tensor,
  chosen: tf.Tensor,
  kernels: Sequence[PackedKernel],
  mixer: Experts,
) -> tf.Tensor:
  """Returns the sum of the results of each row's experts, shaped as x.

  Args:
    x: rows [rows, d_model], float32 or bfloat16.
    gates, chosen: factors, float32, and numbers of the experts of each row,
      int32; [rows, chosen] both.
    kernels: joined wi_gate and wi of all experts, and wo.
    mixer: settings of the experts.
  """
  inputs, output = kernels
  y = operations().palm_experts(
    x=x,
    gates=gates,
    chosen=chosen,
    in_kernels=inputs.panels,
    out_kernels=output.panels,
    experts=mixer.count,
    d_expert=inputs.outer // 2,
    activation=ACTIVATIONS.index(mixer.mlp.activation),
    format=FORMATS.index(output.dtype),
    tile_rows=output.products.tile_rows(output.dtype, is_step=False),
    threads=count_threads(kernels),
  )
  y.set_shape(x.shape)
  return y


@dataclasses.dataclass(frozen=True)
class StepWeights:
  """The constant inputs of a decoding step: weights, tables and settings."""

  config: ModelConfig
  memory_length: int  # number of positions in the cache
  table: tf.Tensor  # embedding, [vocab, d_model], activation dtype
  # sin and cos, [memory_length, rotary_size / 2] float32 each, for each of
  # `Model.rotaries`.
  angles: Sequence[np.ndarray]
  # Scales plus offsets of norms in a step's order, float32: [d_model] each; for
  # norms of heads, [d_kv] or [heads, d_kv].
  scales: Sequence[tf.Tensor]
  # Per router: its kernel, [d_model, router], and any bias, [router].
  routers: Sequence[tf.Tensor]
  # Of products in a step's order: those of layers, without experts; that of the
  # logits; then per layer with experts, the kernels that `sum_experts` takes.
  kernels: Sequence[PackedKernel]

  def make_arguments(self) -> dict[str, object]:
    """Returns the arguments that both C++ decoding operations take."""
    config, kernels = self.config, self.kernels
    layers, rotaries = model_of(config).layers, model_of(config).rotaries
    experts = model_of(config).experts
    attention, (mlp, *_) = layers[0].attention, _mlps(layers[0])
    is_sparse = [bool(x.sparse) for x in layers]
    form = attention.inputs[0].head_norm
    num_joined = len(kernels) - 2 * sum(is_sparse)
    # If the layers' kernels are int4, only the logits' kernel, which is int8,
    # can use tiles. Otherwise all kernels have the same `tile_rows`.
    logits = kernels[num_joined - 1]
    return {
      "table": self.table,
      "angles": self.angles,
      "scales": self.scales,
      "routers": self.routers,
      "kernels": [kernel.panels for kernel in kernels],
      "memory_length": self.memory_length,
      # Per layer: its index in `rotaries` or -1; and its window.
      "rotaries": [
        rotaries.index(x.rotary) if x.rotary else -1 for x in layers
      ],
      "windows": [
        x.attention.mixer.window or self.memory_length for x in layers
      ],
      "rotates_neighbours": [int(x.pairs == "neighbours") for x in rotaries],
      "score_scale": _score_scale(attention.mixer, config.d_kv),
      "has_head_norms": bool(form),
      "joins_heads": bool(form) and form.joins_heads,
      "has_output_norms": bool(attention.output_norm),
      "heads": config.num_heads,
      "key_heads": config.key_heads,
      "d_kv": config.d_kv,
      "d_ffs": [
        config.expert_size * (config.shared_experts or 0) if x else config.d_ff
        for x in is_sparse
      ],
      "is_sparse": [int(x) for x in is_sparse],
      "experts": experts.count if experts else 0,
      "experts_per_row": experts.per_token if experts else 0,
      "d_expert": config.expert_size,
      "is_sigmoid": bool(experts) and experts.router == "sigmoid",
      "normalizes": bool(experts) and experts.normalizes,
      "router_scale": experts.scale if experts else 1.0,
      "has_router_bias": bool(experts) and experts.has_bias,
      "is_serial": config.block == "serial",
      "is_centered": IS_CENTERED[NORMS[config.norm].statistic],
      "epsilon": config.norm_epsilon,
      "activation": ACTIVATIONS.index(mlp.activation),
      "embedding_scale": config.embedding_scale,
      "format": FORMATS.index(kernels[0].dtype),
      "logits_format": FORMATS.index(logits.dtype),
      "tile_rows": logits.products.tile_rows(logits.dtype, is_step=True),
      "threads": count_threads(kernels),
    }


def _score_scale(mixer: Attention, d_kv: int) -> float:
  # Computes 1 / sqrt(d_kv) in float32, as C++ does.
  if mixer.scale is None:
    return float(np.float32(1) / np.sqrt(np.float32(d_kv)))
  return mixer.scale


def run_decode_step(
  weights: StepWeights,
  tokens: tf.Tensor,
  positions: tf.Tensor,
  cache: Sequence[tf.Tensor],
) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
  """Reads one token per row; returns the logits of the next token of each row.

  Args:
    tokens: [rows], int32.
    positions: [rows], int32: position of each token.
    cache: keys of layer 0, values of layer 0, keys of layer 1 and so on, each
      [rows or more, memory_length, d_kv] or (multi-head) [rows or more, heads,
      memory_length, d_kv], activation dtype; written in place.

  Returns:
    Logits, [rows, vocab] float32, also of the embedding's padding rows; the
    vectors that give them, [rows, d_model] float32; the cache after the tokens.
  """
  logits, key, after = operations().palm_decode_step(
    tokens=tokens, positions=positions, cache=cache, **weights.make_arguments()
  )
  logits.set_shape([tokens.shape[0], weights.table.shape[0]])
  return logits, key, set_shapes(after, cache)


class Texts(NamedTuple):
  """The texts to continue, one per row, before the first step."""

  tokens: tf.Tensor  # last token of each text, [rows] int32
  positions: tf.Tensor  # position of the last token in its text, [rows] int32
  places: tf.Tensor  # number of tokens drawn so far for each text, [rows] int32
  is_over: tf.Tensor  # whether the text has ended, [rows] bool
  keys: tf.Tensor  # hash of (SEED, prompt, sample), [rows, 2] int32
  temperature: tf.Tensor  # TEMPERATURE of each text, [rows] float32
  top_k: tf.Tensor  # TOP_K of each text, [rows] int32; 0 keeps all tokens
  top_p: tf.Tensor  # TOP_P of each text, [rows] float32
  # Maximum number of tokens to choose per text, [rows] int32; None for one per
  # step. Steps by TensorFlow's operations choose one per step in any case.
  limits: tf.Tensor | None = None
  # With a repetition penalty, one tensor, [rows, vocab] bool, that says whether
  # each token occurs in the text. Otherwise ().
  seen: Sequence[tf.Tensor] = ()
  # For prompt lookup (native/lookup.h), one tensor from `make_history`, which
  # is written in place. Otherwise (); then a step chooses one token per text.
  history: Sequence[tf.Tensor] = ()
  # One tensor, [rows * masks, words] int32, or (): bit i % 32 of word i // 32
  # says whether the next token may be i. A row has a mask for the next token,
  # and one for the token after each of its `drafts`. With masks, run one step.
  masks: Sequence[tf.Tensor] = ()
  # One tensor, [rows] int32, or (): number of the adapter (native/adapters.py)
  # of each text, 0 for none. Only steps in C++ add adapters.
  adapters: Sequence[tf.Tensor] = ()
  # One tensor, [rows, masks - 1] int32, or (): tokens that the step reads after
  # each last token, then -1. Only steps in C++ read drafts.
  drafts: Sequence[tf.Tensor] = ()


def make_history(prompts: tf.Tensor, most_tokens: int) -> tf.Tensor:
  """Returns `Texts.history`, [rows, _COUNTS + most_tokens] int32.

  Args:
    prompts: tokens that each text begins with, [rows, tokens] int32.
    most_tokens: maximum number of tokens in a text, prompt included.
  """
  after = most_tokens - prompts.shape[1]
  return tf.pad(prompts, [[0, 0], [_COUNTS, after]])


def write_history(
  history: tf.Tensor, tokens: tf.Tensor, rows: tf.Tensor, positions: tf.Tensor
) -> tf.Tensor:
  """Writes tokens [tokens] at positions of rows; a first token begins again."""
  tokens, rows, positions = (
    x[:, tf.newaxis] for x in (tokens, rows, positions)
  )
  begin = rows * history.shape[1]
  at, counts = begin + _COUNTS + positions, begin + tf.range(_COUNTS)
  # A first token also clears the counts; the others are written twice.
  places = tf.concat([at, tf.where_v2(positions > 0, at, counts)], 1)
  values = tf.concat(
    [tokens, tf.where_v2(positions > 0, tokens, 0 * counts)], 1
  )
  written = tf.raw_ops.InplaceUpdate(
    x=tf.reshape(history, [-1, 1]),
    i=tf.reshape(places, [-1]),
    v=tf.reshape(values, [-1, 1]),
  )
  return tf.reshape(written, history.shape)


class TextSettings(NamedTuple):
  """Settings of steps that all texts share."""

  num_tokens: int  # number of pieces in the vocabulary
  # Tokens that end a text; (-1,) if no token does. After its end, a text is
  # filled with the first of these tokens.
  end_ids: Sequence[int]
  repetition_penalty: float = 1.0  # 1 for no penalty
  keeps_logits: bool = False  # whether to return the last step's logits
  # Maximum number of steps; only XLA, whose shapes are constant, needs this.
  most_steps: int | None = None
  # Descriptor of a socket, [] int32, for steps in C++ (native/token_feed.h):
  # each step sends its tokens, as (row, `places` of the token, token), and the
  # call ends after a step if its caller has sent anything. None for no socket.
  socket: tf.Tensor | None = None


class TextSteps(NamedTuple):
  """Texts and cache after some steps."""

  num_steps: tf.Tensor  # most tokens that were chosen for a text, [] int32
  # Chosen tokens, [rows, at least num_steps] int32; `end_ids[0]` after a text
  # has ended or reached its limit, and after the last step.
  chosen: tf.Tensor
  logits: tf.Tensor  # last step's, [rows, vocab] float32, if `keeps_logits`
  seen: list[tf.Tensor]  # `Texts.seen` with the chosen tokens
  cache: list[tf.Tensor]  # without the last token of each text
  history: Sequence[tf.Tensor] = ()  # `Texts.history` with the chosen tokens
  drafts: Sequence[tf.Tensor] = ()  # `Texts.drafts` for the next step


def run_text_steps(
  weights: StepWeights,
  count: tf.Tensor,
  texts: Texts,
  cache: Sequence[tf.Tensor],
  settings: TextSettings,
) -> TextSteps:
  """Continues texts by `count` steps ([] int32), or until all texts have ended.

  With `Texts.history`, a step may choose several tokens of a text, the same
  that as many steps without it would choose. `cache` has the shapes that
  `run_decode_step` takes; it is written in place.
  """
  chosen, logits, seen, history, drafts, after = operations().palm_text_steps(
    count=count,
    socket=tf.constant(-1) if settings.socket is None else settings.socket,
    ends=tf.constant(list(settings.end_ids)),
    **texts._asdict(),
    cache=cache,
    most_greedy=MOST_GREEDY,
    num_tokens=settings.num_tokens,
    repetition_penalty=settings.repetition_penalty,
    keeps_logits=settings.keeps_logits,
    **weights.make_arguments(),
  )
  rows = texts.tokens.shape[0]
  chosen.set_shape([rows, None])
  vocab = weights.table.shape[0]
  logits.set_shape([rows if settings.keeps_logits else 0, vocab])
  return TextSteps(
    tf.shape(chosen)[1],
    chosen,
    logits[:, : weights.config.vocab_size],
    set_shapes(seen, texts.seen),
    set_shapes(after, cache),
    set_shapes(history, texts.history),
    set_shapes(drafts, texts.drafts),
  )


def count_threads(kernels: Sequence[PackedKernel]) -> int:
  """Returns how many threads compute products with these kernels."""
  mean = sum(math.prod(x.panels.shape) for x in kernels) / len(kernels)
  return max(1, min(usable_cores(), int(mean / _BYTES_FOR_A_THREAD)))
