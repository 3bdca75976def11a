# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The operations of operations.cc in a graph, on one CPU device."""

import dataclasses
import functools
import logging
import math
from collections.abc import Sequence
from types import ModuleType

from palm_mtf._tf import mtf, tf
from palm_mtf.config.model import PalmConfig
from palm_mtf.machine.cores import usable_cores
from palm_mtf.native.build import BuildError, compiled
from palm_mtf.native.packing import FORMATS, PackedKernel

_logger = logging.getLogger(__name__)

# A thread reads so many bytes in some 5 microseconds; to meet another one takes
# up to one.
_BYTES_FOR_A_THREAD = 250_000


@functools.cache
def operations() -> ModuleType | None:
  """Returns the compiled operations; None, with a warning, without them."""
  try:
    return tf.load_op_library(compiled())
  except (BuildError, tf.errors.OpError) as error:
    reason = str(error).strip().splitlines()[0]
    _logger.warning(
      "training and decoding are not compiled for this CPU: a training step "
      "takes a twentieth longer, decoding up to nine times as long: %s; "
      "install g++ 11 or newer, or name it by CXX",
      reason,
    )
    return None


def threads_here() -> int:
  """Returns the threads of an operation in this process, 0 without any."""
  return usable_cores() if operations() else 0


def threads_of(mesh_impl: mtf.MeshImpl) -> int:
  """Returns the threads of an operation on a device of a mesh, or 0."""
  # Meshes that other projects place know nothing of it.
  return getattr(mesh_impl, "native_threads", 0)


def read_product(
  wide: tf.Tensor,
  sizes: Sequence[int],
  angles: Sequence[tf.Tensor],
  *,
  is_gated: bool,
  threads: int,
) -> list[tf.Tensor]:
  """Splits a product, rotates its q and k, and applies SwiGLU.

  Args:
    wide: product of all rows, [rows, columns], float32 or bfloat16.
    sizes: number of columns of each kernel.
    angles: sin and cos, [length, d_kv / 2] float32 each, by which the first two
      kernels' columns are rotated; () where none are.
    is_gated: whether the last two kernels are wi_gate and wi.
    threads: number of threads.

  Returns:
    [rows, size] of each kernel; of wi_gate and wi together, swish(x wi_gate) *
    (x wi).
  """
  read = sizes[:-1] if is_gated else sizes
  parts = operations().palm_read_product(
    wide=wide,
    angles=list(angles),
    num_parts=len(read),
    sizes=list(sizes),
    is_gated=is_gated,
    threads=threads,
  )
  for part, size in zip(parts, read, strict=True):
    part.set_shape([wide.shape[0], size])
  return parts


def read_product_gradient(
  wide: tf.Tensor,
  gradients: Sequence[tf.Tensor],
  sizes: Sequence[int],
  angles: Sequence[tf.Tensor],
  *,
  is_gated: bool,
  threads: int,
) -> tf.Tensor:
  """Returns the gradient of a product, [rows, columns].

  Args:
    wide: the product.
    gradients: gradient of each result of `read_product`.
    sizes: number of columns of each kernel.
    angles: see `read_product`.
    is_gated: see `read_product`.
    threads: number of threads.
  """
  gradient = operations().palm_read_product_gradient(
    wide=wide,
    gradients=list(gradients),
    angles=list(angles),
    sizes=list(sizes),
    is_gated=is_gated,
    threads=threads,
  )
  gradient.set_shape(wide.shape)
  return gradient


def sum_logits(
  logits: tf.Tensor, targets: tf.Tensor, *, threads: int
) -> list[tf.Tensor]:
  """Returns the largest logit, the normalizer and the target's logit of rows.

  Args:
    logits: [rows, vocab], float32 or bfloat16.
    targets: [rows], int32; below 0 where these logits lack a row's target.
    threads: number of threads.

  Returns:
    The largest logit, the sum of exp(logits - largest), and the target's logit
    or 0, [rows] float32 each.
  """
  sums = operations().palm_sum_logits(
    logits=logits, targets=targets, threads=threads
  )
  sums.set_shape([logits.shape[0], 3])
  return tf.unstack(sums, axis=1)


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
  return logits, _with_shapes(after, cache)


def greedy_steps(
  weights: StepWeights,
  place: tf.Tensor,
  limit: tf.Tensor,
  rows: Sequence[tf.Tensor],
  positions: tf.Tensor,
  cache: Sequence[tf.Tensor],
  *,
  num_tokens: int,
  eod_id: int,
) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
  """Goes on by the likeliest tokens, to a limit or until all rows have ended.

  Args:
    weights: the model.
    place: number of tokens that each row has behind its prompt, [] int32.
    limit: number of tokens to stop at, [] int32.
    rows: last token of each row, [rows] int32; its tokens behind the prompt,
      [rows, max_tokens] int32; whether it has ended, [rows] bool.
    positions: [rows], int32: place of each row's last token in its text.
    cache: see `decode_step`.
    num_tokens: pieces of the vocabulary.
    eod_id: token that ends a row.

  Returns:
    `place`, `rows` and `cache` behind the last step.
  """
  tokens, texts, is_over = rows
  place, *rows_after, cache_after = operations().palm_greedy_steps(
    place=place,
    limit=limit,
    tokens=tokens,
    texts=texts,
    is_over=is_over,
    positions=positions,
    cache=cache,
    num_tokens=num_tokens,
    eod=eod_id,
    **weights.arguments(),
  )
  place.set_shape([])
  return place, _with_shapes(rows_after, rows), _with_shapes(cache_after, cache)


def _with_shapes(after, before):
  for x, like in zip(after, before, strict=True):
    x.set_shape(like.shape)
  return list(after)


def _threads(kernels: Sequence[PackedKernel]) -> int:
  mean = sum(math.prod(x.panels.shape) for x in kernels) / len(kernels)
  return max(1, min(usable_cores(), int(mean / _BYTES_FOR_A_THREAD)))
