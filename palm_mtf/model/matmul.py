# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Products of activations, kernels and gradients, in C++ where it is faster."""

import math
from collections.abc import Sequence

from palm_mtf._tf import tf
from palm_mtf.native import matmul as native
from palm_mtf.ops import matmul as ops
from palm_mtf.ops.matmul import is_emulated


def matmul(
  a: tf.Tensor,
  b: tf.Tensor,
  *,
  threads: int,
  transpose_a: bool = False,
  transpose_b: bool = False,
  dtype: tf.DType | None = None,
) -> tf.Tensor:
  """Multiplies two matrices; see `matmul` of ops/matmul.py.

  `threads` is their number per C++ operation; 0 if the device has no such
  operations.
  """
  inner = None if transpose_a else a.shape[1]
  if not native.multiplies(a, inner, threads=threads):
    how = dict(transpose_a=transpose_a, transpose_b=transpose_b, dtype=dtype)
    return ops.matmul(a, b, **how)
  (y,) = native.matmul(
    a,
    [b],
    [b.shape[0 if transpose_b else 1]],
    transpose_a=transpose_a,
    transpose_b=transpose_b,
    dtype=dtype or a.dtype,
    threads=threads,
  )
  return y


def matmul_joined(
  x: tf.Tensor, kernels: Sequence[tf.Tensor], *, threads: int
) -> tf.Tensor:
  """Returns the product of x and joined kernels, [rows, columns].

  x is [rows, d_model]; each kernel is [d_model, ...], dtype of x.
  """
  parts = _matrices(kernels)
  if not native.multiplies(x, x.shape[1], threads=threads):
    return ops.matmul(x, tf.concat(parts, 1))
  columns = sum(part.shape[1] for part in parts)
  return native.matmul(x, parts, [columns], threads=threads)[0]


def joined_input_gradient(
  dy: tf.Tensor, kernels: Sequence[tf.Tensor], *, threads: int
) -> tf.Tensor:
  """Returns the gradient of x, given that of `matmul_joined`'s result."""
  parts = _matrices(kernels)
  if not native.multiplies(dy, dy.shape[1], threads=threads):
    return ops.matmul(dy, tf.concat(parts, 1), transpose_b=True)
  sizes = [parts[0].shape[0]]
  return native.matmul(dy, parts, sizes, transpose_b=True, threads=threads)[0]


def joined_kernel_gradients(
  x: tf.Tensor,
  dy: tf.Tensor,
  shapes: Sequence[Sequence[int]],
  *,
  threads: int,
) -> list[tf.Tensor]:
  """Returns the kernels' gradients, given that of `matmul_joined`'s result.

  `shapes` has the shape of each kernel without d_model.
  """
  sizes = [math.prod(shape) for shape in shapes]
  if native.multiplies(x, None, threads=threads):
    found = native.matmul(x, [dy], sizes, transpose_a=True, threads=threads)
  elif threads and x.dtype == tf.bfloat16 and not is_emulated(x):
    # In bfloat16, oneDNN's product is 3% to 16% faster with a transposed copy
    # of x (cheap, because x has few columns); in float32 a copy is slower.
    found = tf.split(ops.matmul(tf.transpose(x), dy), sizes, 1)
  else:
    found = tf.split(ops.matmul(x, dy, transpose_a=True), sizes, 1)
  return [
    tf.reshape(each, [x.shape[1], *shape])
    for each, shape in zip(found, shapes, strict=True)
  ]


def _matrices(kernels):
  return [tf.reshape(x, [x.shape[0], -1]) for x in kernels]
