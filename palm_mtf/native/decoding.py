# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations of decoding in a graph, on one CPU device."""

import dataclasses
import math
from collections.abc import Sequence

from palm_mtf._tf import tf
from palm_mtf.config.decode import MOST_GREEDY, DecodeConfig
from palm_mtf.config.model import PalmConfig
from palm_mtf.machine.cores import usable_cores
from palm_mtf.native.operations import operations, with_shapes
from palm_mtf.native.packing import FORMATS, PackedKernel

# A thread reads so many bytes in some 5 microseconds; to meet another one takes
# up to one.
_BYTES_FOR_A_THREAD = 250_000


def product(
  xs: Sequence[tf.Tensor], kernel: PackedKernel, dtype: tf.DType
) -> tf.Tensor:
  """Multiplies rows by a packed kernel, [rows, outer].

  Args:
    xs: [rows, inner] in parts of some columns each, float32 or bfloat16.
    kernel: [inner, outer].
    dtype: float32 or bfloat16, that of the product.
  """
  y = operations().palm_product(
    xs=list(xs),
    kernel=kernel.panels,
    Tout=dtype,
    outer=kernel.outer,
    format=FORMATS.index(kernel.dtype),
    threads=_threads([kernel]),
  )
  y.set_shape([xs[0].shape[0], kernel.outer])
  return y


@dataclasses.dataclass(frozen=True)
class StepWeights:
  """What a decoding step reads beside the tokens and the cache.

  Attributes:
    config: the architecture.
    tables: embedding, [vocab, d_model], activation dtype; sin and cos of
      rotary embedding, [memory_length, d_kv / 2], float32.
    scales: scales of the norms in turn, [d_model] float32 each.
    kernels: kernels of the products in turn, that of the logits last.
  """

  config: PalmConfig
  tables: Sequence[tf.Tensor]
  scales: Sequence[tf.Tensor]
  kernels: Sequence[PackedKernel]

  def arguments(self) -> dict[str, object]:
    """Returns inputs and attributes of the operations that make steps."""
    config, kernels = self.config, self.kernels
    table, sines, cosines = self.tables
    return {
      "table": table,
      "sines": sines,
      "cosines": cosines,
      "scales": self.scales,
      "kernels": [kernel.panels for kernel in kernels],
      "layers": config.num_layers,
      "heads": config.num_heads,
      "key_heads": config.num_heads if config.attention == "multi_head" else 1,
      "d_kv": config.d_kv,
      "d_ff": config.d_ff,
      "is_serial": config.block == "serial",
      "is_centered": config.norm == "layer_norm",
      "format": FORMATS.index(kernels[0].dtype),
      "logits_format": FORMATS.index(kernels[-1].dtype),
      "threads": _threads(kernels),
    }


def decode_step(
  weights: StepWeights,
  tokens: tf.Tensor,
  positions: tf.Tensor,
  cache: Sequence[tf.Tensor],
) -> tuple[tf.Tensor, list[tf.Tensor]]:
  """Reads one token of every row; see `Decoder.step`.

  Args:
    weights: the model.
    tokens: [rows], int32.
    positions: [rows], int32: place of each token.
    cache: keys and values of each layer in turn, [rows or more, (heads,)
      memory_length, d_kv], activation dtype; overwritten.

  Returns:
    Logits, [rows, vocab] float32, and the cache with these tokens.
  """
  logits, after = operations().palm_decode_step(
    tokens=tokens, positions=positions, cache=cache, **weights.arguments()
  )
  logits.set_shape([tokens.shape[0], weights.tables[0].shape[0]])
  return logits, with_shapes(after, cache)


def text_steps(
  weights: StepWeights,
  places: Sequence[tf.Tensor],
  rows: Sequence[tf.Tensor],
  fixed: Sequence[tf.Tensor],
  cache: Sequence[tf.Tensor],
  *,
  sampling: DecodeConfig,
  num_tokens: int,
  eod_id: int,
) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
  """Goes on with texts, to a limit or until all have ended.

  Args:
    weights: the model.
    places: numbers of tokens that each row has behind its prompt, and that it
      stops at, [] int32 each.
    rows: last token of each row, [rows] int32, and its state (`Sampling`).
    fixed: place of each row's last token in its text, [rows] int32; and keys of
      its draws, [rows, 2] int32.
    cache: see `decode_step`.
    sampling: settings of sampling.
    num_tokens: pieces of the vocabulary.
    eod_id: token that ends a row.

  Returns:
    The first of `places`, `rows` and `cache` behind the last step.
  """
  place, limit = places
  tokens, texts, is_over, *seen = rows
  positions, keys = fixed
  place, tokens, texts, is_over, seen, cache_after = (
    operations().palm_text_steps(
      limit=limit,
      place=place,
      tokens=tokens,
      texts=texts,
      is_over=is_over,
      seen=seen,
      keys=keys,
      positions=positions,
      cache=cache,
      num_tokens=num_tokens,
      eod=eod_id,
      is_greedy=sampling.is_greedy,
      temperature=sampling.temperature,
      top_k=sampling.top_k or 0,
      top_p=sampling.top_p,
      repetition_penalty=sampling.repetition_penalty,
      **weights.arguments(),
    )
  )
  place.set_shape([])
  after = with_shapes([tokens, texts, is_over, *seen], rows)
  return place, after, with_shapes(cache_after, cache)


def next_tokens_of_rows(
  logits: tf.Tensor,
  key: tf.Tensor,
  place: tf.Tensor,
  settings: Sequence[tf.Tensor],
  num_tokens: int,
) -> tf.Tensor:
  """Samples a token for every row by settings of its own, [rows] int32.

  Args:
    logits: [rows, vocab], float32.
    key: [rows, 2], int32: hash of (SEED, prompt, sample).
    place: number of tokens that each row has drawn before, [rows] int32.
    settings: temperature, top_k and top_p of each row (`RowSettings`).
    num_tokens: pieces of the vocabulary.
  """
  temperature, top_k, top_p = settings
  tokens = operations().palm_next_tokens(
    logits=logits,
    keys=key,
    places=place,
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
    most_greedy=MOST_GREEDY,
    num_tokens=num_tokens,
    threads=usable_cores(),
  )
  tokens.set_shape(place.shape)
  return tokens


def _threads(kernels: Sequence[PackedKernel]) -> int:
  mean = sum(math.prod(x.panels.shape) for x in kernels) / len(kernels)
  return max(1, min(usable_cores(), int(mean / _BYTES_FOR_A_THREAD)))
