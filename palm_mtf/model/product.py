# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The product of activations with a kernel, and with its adapter."""

import dataclasses
import functools
from collections.abc import Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.adapter import LowRank
from palm_mtf.model.low_rank import LowRanks, join_firsts
from palm_mtf.model.matmul import matmul
from palm_mtf.ops.recompute import recompute
from palm_mtf.ops.slicewise import ByDevice, WholeSlice

_SPLITTABLE = ["batch", "length", "heads", "d_ff", "vocab"]


def product(
  x: mtf.Tensor,
  kernel: mtf.Tensor,
  adapter: tuple[LowRank, Sequence[mtf.Tensor]] | None = None,
  *,
  transpose: bool = False,
  dtype: tf.DType | None = None,
  keeps_kernel: bool = False,
  gradient_dtype: tf.DType | None = None,
) -> mtf.Tensor:
  """Multiplies x by a kernel.

  If a layout splits the inputs, the product is an mtf.LazyAllreduceSum.

  Args:
    x: [batch, length, inputs...], activation dtype.
    kernel: [inputs..., output], or [output, inputs] if `transpose`; dtype of x.
    adapter: how the kernel is adapted, with the factors [inputs..., rank] and
      [rank, output], dtype of x, and for DoRA the columns' factors, [output]
      float32; None for no adapter.
    dtype: dtype of the product: float32 or the dtype of x (the default).
    keeps_kernel: whether to keep the kernel for the backward pass, which
      otherwise recomputes it (ops/recompute.py).
    gradient_dtype: dtype of the kernel's gradient; None is the dtype of x.

  Returns:
    [batch, length, output].
  """
  output = kernel.shape.dims[0 if transpose else -1]
  low_rank, tensors = adapter or (None, [])
  of_weights = gradient_dtype or x.dtype

  def by_device(function):
    def native(threads, *given):
      how = _Product(transpose, dtype, of_weights, low_rank, threads)
      return function(how, *given)

    return ByDevice(functools.partial(native, 0), native)

  def gradient(op, dy):
    x, *weights = op.inputs
    if not keeps_kernel:
      weights = [recompute(each, dy) for each in weights]
    kernel, *others = weights
    return WholeSlice(
      by_device(_Product.backward),
      [recompute(x, dy), kernel, dy, *others],
      [
        (x.shape, x.dtype),
        *((y.shape, of_weights) for y in (kernel, *others[:2])),
        *((y.shape, y.dtype) for y in others[2:]),
      ],
      splittable=_SPLITTABLE,
      name="product_gradient",
    ).outputs

  return WholeSlice(
    by_device(_Product.forward),
    [x, kernel, *tensors],
    [(mtf.Shape([*x.shape.dims[:2], output]), dtype or x.dtype)],
    splittable=_SPLITTABLE,
    gradient=gradient,
    name="product",
  ).outputs[0]


@dataclasses.dataclass(frozen=True)
class _Product:
  """The functions of a device's slices; see `product`."""

  transpose: bool
  dtype: tf.DType | None
  gradient_dtype: tf.DType
  low_rank: LowRank | None
  threads: int  # per C++ operation; 0 if the device has no C++ operations

  def forward(self, x, kernel, *adapter):
    y, _ = self._multiply(*self._matrices(x, kernel), adapter)
    for factors in adapter[2:]:
      y = _scale_columns(y, factors)
    return tf.reshape(y, [*x.shape[:2], y.shape[1]])

  def backward(self, x, kernel, dy, *adapter):
    rows, matrix = self._matrices(x, kernel)
    dy = tf.cast(tf.reshape(dy, [rows.shape[0], -1]), x.dtype)
    of_adapter, of_x = [], 0
    if adapter:
      dy, of_x, of_adapter = self._adapter_gradients(rows, matrix, dy, adapter)
    threads = self.threads
    dx = matmul(dy, matrix, transpose_b=not self.transpose, threads=threads)
    if adapter:
      dx += of_x
    first, second = (dy, rows) if self.transpose else (rows, dy)
    dkernel = matmul(first, second, transpose_a=True, threads=threads)
    dkernel = tf.reshape(dkernel, kernel.shape)
    dkernel = tf.cast(dkernel, self.gradient_dtype)
    return tf.reshape(dx, x.shape), dkernel, *of_adapter

  def _matrices(self, x, kernel):
    x = tf.reshape(x, [x.shape[0] * x.shape[1], -1])
    if self.transpose:
      return x, kernel
    return x, tf.reshape(kernel, [x.shape[1], -1])

  def _multiply(self, rows, matrix, adapter):
    # Returns x W + s (x A) B, and s (x A) if there is an adapter.
    y = matmul(
      rows,
      matrix,
      transpose_b=self.transpose,
      dtype=self.dtype,
      threads=self.threads,
    )
    if not adapter:
      return y, None
    low = self._low_ranks(matrix).down(rows, adapter[:1])
    return y + self._low_ranks(matrix).up(low, adapter[1:2]), low

  def _adapter_gradients(self, rows, matrix, dy, adapter):
    # Returns the gradient of x W + s (x A) B, the part of x's gradient that is
    # through A, and the gradients of the adapter's tensors.
    low_ranks, of_factors = self._low_ranks(matrix), []
    low = low_ranks.down(rows, adapter[:1])
    for factors in adapter[2:]:
      y, _ = self._multiply(rows, matrix, adapter)
      found = tf.cast(y, tf.float32) * tf.cast(dy, tf.float32)
      of_factors.append(tf.reduce_sum(found, 0))
      dy = _scale_columns(dy, factors)
    dlow = low_ranks.down_gradient(dy, adapter[1:2])
    da = matmul(rows, dlow, transpose_a=True, threads=self.threads)
    found = [tf.reshape(da, adapter[0].shape)]
    found += low_ranks.up_gradients(low, dy)
    found = [tf.cast(x, self.gradient_dtype) for x in found]
    firsts = join_firsts(adapter[:1])
    of_x = matmul(dlow, firsts, transpose_b=True, threads=self.threads)
    return dy, of_x, [*found, *of_factors]

  def _low_ranks(self, matrix):
    rank, scale, _ = self.low_rank
    return LowRanks([[matrix.shape[1]]], [rank], scale)


def _scale_columns(y, factors):
  return tf.cast(tf.cast(y, tf.float32) * factors, y.dtype)
