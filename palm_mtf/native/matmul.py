# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""C++ products of bfloat16 matrices, for training on one CPU device."""

from collections.abc import Sequence

from palm_mtf._tf import tf
from palm_mtf.machine.processors import cpu_flags
from palm_mtf.native.build import has_avx512_bf16
from palm_mtf.native.operations import operations


def multiplies(x: tf.Tensor, inner: int | None, *, threads: int) -> bool:
  """Returns whether `matmul` multiplies x, and faster than oneDNN.

  With AVX512-BF16, `matmul` is 4% to 13% faster (docs/benchmarks.md). On a CPU
  with AMX, oneDNN multiplies, because it uses AMX and `matmul` does not.

  Args:
    x: one of the operands.
    inner: size of the inner dimension; None if the left operand is transposed.
    threads: per C++ operation; 0 if the device has no C++ operations.
  """
  if x.dtype != tf.bfloat16 or not threads or (inner and inner % 2):
    return False
  return has_avx512_bf16() and "amx_bf16" not in cpu_flags()


def matmul(
  a: tf.Tensor,
  bs: Sequence[tf.Tensor],
  sizes: Sequence[int],
  *,
  transpose_a: bool = False,
  transpose_b: bool = False,
  dtype: tf.DType = tf.bfloat16,
  threads: int,
) -> list[tf.Tensor]:
  """Multiplies `a` by joined matrices, and splits the product's columns.

  Sums are float32. A row of the result has the same bits whichever rows are
  computed with it, and for any number of threads.

  Args:
    a: [rows, inner] bfloat16, or [inner, rows] if `transpose_a`. Without
      `transpose_a`, `inner` is even.
    bs: matrices with equally many rows, bfloat16, whose columns, joined, are
      [inner, columns], or [columns, inner] if `transpose_b`.
    sizes: number of columns of each result.
    dtype: of the results: bfloat16 or float32.

  Returns:
    One tensor [rows, size] per size.
  """
  parts = operations().palm_matmul(
    a=a,
    bs=list(bs),
    num_ys=len(sizes),
    Tout=dtype,
    sizes=list(sizes),
    transpose_a=transpose_a,
    transpose_b=transpose_b,
    threads=threads,
  )
  rows = a.shape[1 if transpose_a else 0]
  for part, size in zip(parts, sizes, strict=True):
    part.set_shape([rows, size])
  return parts
