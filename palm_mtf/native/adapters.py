# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""C++ operations that add x A B to rows, with the adapter of each row.

C++ keeps the factors of adapters under numbers, so that calls name adapters,
and adapters come and go while programs run. A number names one adapter only.
"""

from collections.abc import Sequence

from palm_mtf._tf import tf
from palm_mtf.native.decoding import PackedKernel, count_threads
from palm_mtf.native.operations import operations


def keep_adapter(
  number: tf.Tensor, parts: tf.Tensor, values: tf.Tensor, dtype: tf.DType
) -> tf.Tensor:
  """Keeps the factors of an adapter for steps and products in this process.

  Args:
    number: positive number of the adapter, [] int32.
    parts: [kernels, 6] int32, per adapted kernel: index of the product that
      computes it, among those of a decoding step; first row and number of rows
      of A in the product's input; rank; first column and number of columns of B
      in the product. Without kernels, the adapter is dropped.
    values: float32, for each kernel A transposed, [rank, inputs], and s B,
      [rank, outputs], flat.
    dtype: the activation dtype, in which factors are kept.

  Returns:
    The number of adapters that are kept now, [1, 1] int32.
  """
  return operations().palm_keep_adapter(
    number=number, parts=parts, numbers=values, T=dtype
  )


def add_adapter(
  y: tf.Tensor,
  xs: Sequence[tf.Tensor],
  number: tf.Tensor,
  product: int,
  kernel: PackedKernel,
) -> tf.Tensor:
  """Returns y + x A B, for one adapter of all rows.

  Args:
    y: product of the rows with a kernel of the base, [rows, outer].
    xs: parts of the rows [rows, inner], cut along `inner`, dtype of y.
    number: number of the adapter, [] int32; 0 for none.
    product: index of the product, as in `keep_adapter`.
    kernel: the kernel of the base.
  """
  found = operations().palm_add_adapter(
    number=number,
    product_rows=y,
    xs=list(xs),
    product=product,
    threads=count_threads([kernel]),
  )
  found.set_shape(y.shape)
  return found
