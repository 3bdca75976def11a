# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Products with weights that do not change any more, as decoding needs them.

One token a step reads every weight for a handful of multiplications: what
counts is the bytes of the weights and that they are read in one stream. On CPUs
oneDNN keeps its own packed copy of each (`packed_matmul`); elsewhere these are
plain products.

  float weights   y = x w
  int8 weights    y = s_x round(x / s_x) round(w / s_w) s_w

with a scale s_w for each output channel, as in PaLM's published inference code,
and one s_x for each row of x, taken when it is there: products of int8 numbers
are several times as fast as those of others, and their sums are exact. A row's
result does not depend on the other rows.

A CPU without products of bfloat16 keeps bfloat16 weights as the same numbers in
float32 (ops/bfloat16.py).
"""

import dataclasses

from palm_mtf._tf import tf
from palm_mtf.ops.bfloat16 import is_emulated
from palm_mtf.ops.onednn import has_kernel, int8_matmul, packed_matmul

_LARGEST = 127.0


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A weight on one device, read from variables outside of all loops.

  Attributes:
    value: [inner, outer], activation dtype, int8, or float32 where bfloat16
      is emulated.
    limit: limits of int8 numbers, what -127 and 127 stand for: [outer], float32
      each; None of others.
    initialize: gives the variables their values.
  """

  value: tf.Tensor
  limit: tuple[tf.Tensor, tf.Tensor] | None
  initialize: tf.Operation


def constant_variable(value: tf.Tensor, name: str) -> tf.Variable:
  """Makes a variable that keeps its first value, and is not trained."""
  return tf.Variable(value, trainable=False, use_resource=True, name=name)


def make_kernel(
  w: tf.Tensor, dtype: tf.DType, name: str, largest: tf.Tensor | None = None
) -> Kernel:
  """Makes variables whose first value is a weight.

  Args:
    w: [inner, outer], float32.
    dtype: int8, or of a float weight.
    name: name of the variable.
    largest: [1, outer], of `largest_numbers`, where `w` is a part of what is
      summed; of int8 alone.
  """

  if dtype != tf.int8:
    numbers = tf.cast(w, dtype)
    if is_emulated(numbers):
      numbers = tf.cast(numbers, tf.float32)
    kept = constant_variable(numbers, name)
    return Kernel(kept.value(), None, kept.initializer)
  numbers, scale = to_int8(
    w, largest_numbers(w, 0) if largest is None else largest
  )
  kept = constant_variable(numbers, name)
  high = constant_variable(_LARGEST * scale[0], f"{name}_limit")
  return Kernel(
    kept.value(),
    (-high.value(), high.value()),
    tf.group(kept.initializer, high.initializer),
  )


@dataclasses.dataclass(frozen=True)
class Scaled:
  """Rows as numbers times a scale: what int8 products read and give.

  Attributes:
    numbers: [rows, columns], int8 before a product, float32 behind it.
    scale: [rows, 1], float32.
  """

  numbers: tf.Tensor
  scale: tf.Tensor


Rows = tf.Tensor | Scaled


def parts_of(x: Rows) -> tuple[tf.Tensor, ...]:
  """Returns the tensors of `x`, which a compiled function can take."""
  return (x.numbers, x.scale) if isinstance(x, Scaled) else (x,)


def rows_of(parts: tuple[tf.Tensor, ...]) -> Rows:
  """Returns what `parts_of` took apart."""
  return Scaled(*parts) if len(parts) == 2 else parts[0]


def value_of(parts: tuple[tf.Tensor, ...], dtype: tf.DType) -> tf.Tensor:
  """Returns the value of `parts_of(x)`."""
  return tf.cast(parts[0] * parts[1], dtype) if len(parts) == 2 else parts[0]


def largest_numbers(x: tf.Tensor, axis: int) -> tf.Tensor:
  """Returns max |x| along `axis` of [rows, columns], which stays, float32."""
  return tf.reduce_max(tf.abs(tf.cast(x, tf.float32)), axis, keepdims=True)


def to_int8(x: tf.Tensor, largest: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns round(x / scale), int8, and the scale, float32.

  Args:
    x: [rows, columns].
    largest: result of `largest_numbers`, or of all of a sum of which x is a
    part.
  """
  scale = tf.where_v2(largest > 0, largest, 1.0) / _LARGEST
  return tf.cast(tf.round(tf.cast(x, tf.float32) / scale), tf.int8), scale


def product(x: Rows, kernel: Kernel, *, packed: bool) -> Rows:
  """Returns x kernel.

  Args:
    x: [rows, inner], activation dtype; Scaled for int8.
    kernel: on the device of x.
    packed: whether a packed copy of the weights is kept, for many products.

  Returns:
    [rows, outer], the dtype of x, or Scaled by the scale of x.
  """
  w = kernel.value
  if not isinstance(x, Scaled):
    y = _float_product(tf.cast(x, w.dtype), w, packed)
    return tf.cast(y, x.dtype)
  if _has("_QuantizedMatMul", x.numbers):
    y = int8_matmul(x.numbers, w, kernel.limit, packed=packed)
  else:
    y = tf.matmul(*(tf.cast(each, tf.float32) for each in (x.numbers, w)))
    y *= kernel.limit[1] / _LARGEST
  return Scaled(y, x.scale)


def _float_product(x: tf.Tensor, w: tf.Tensor, packed: bool) -> tf.Tensor:
  # One float32 row is the one product that needs no packing to be fast.
  packed = packed and (w.dtype != tf.float32 or x.shape[0] > 1)
  if packed and _has("_MklNativeFusedMatMul", x):
    return packed_matmul(x, w)
  return tf.matmul(x, w)


def _has(operation: str, x: tf.Tensor) -> bool:
  """Whether there is an operation of oneDNN where x is."""
  return "gpu" not in x.device.lower() and has_kernel(operation)
