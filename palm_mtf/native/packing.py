# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights in the order in which products.h reads them."""

import dataclasses

import numpy as np

from palm_mtf._tf import tf

# In the order of `Format` in products.h.
INT4 = tf.as_dtype("int4")
FORMATS = (tf.float32, tf.bfloat16, tf.int8, INT4)
GROUP = 32  # inner indices that share a scale of 4-bit weights


@dataclasses.dataclass(frozen=True)
class PackedKernel:
  """A constant weight matrix [inner, outer], in panels of columns."""

  panels: tf.Tensor  # [panels, bytes], uint8
  outer: int
  dtype: tf.DType  # one of FORMATS


def pack(w: tf.Tensor, columns: int) -> tf.Tensor:
  """Packs a float matrix, [panels, bytes] uint8.

  Args:
    w: [inner, outer], float32 or bfloat16.
    columns: columns of a panel.
  """
  return _bytes(_panels(w, columns, 4 // w.dtype.size))


def pack_int8(w: tf.Tensor, scale: tf.Tensor, columns: int) -> tf.Tensor:
  """Packs quantized numbers and their scales, [panels, bytes] uint8.

  Args:
    w: [inner, outer], int8.
    scale: [outer], float32.
    columns: columns of a panel.
  """
  total = tf.reduce_sum(tf.cast(w, tf.int32), 0)
  ends = [
    _bytes(tf.reshape(_padded(x, 0, columns), [-1, columns]))
    for x in (scale, total)
  ]
  return tf.concat([_bytes(_panels(w, columns, 4)), *ends], 1)


def pack_int4(w: tf.Tensor, scale: tf.Tensor, columns: int) -> tf.Tensor:
  """Packs numbers from -8 to 7 and their scales, [panels, bytes] uint8.

  Args:
    w: [inner, outer], int8.
    scale: [inner / GROUP, rounded up; outer], bfloat16.
    columns: columns of a panel.
  """
  # A byte has index k of a group below and k + 16 above, each plus 8.
  panels = tf.cast(_panels(w, columns, 4) + 8, tf.uint8)
  halves = tf.reshape(panels, [panels.shape[0], -1, 2, GROUP * columns // 2])
  numbers = halves[:, :, 0] + 16 * halves[:, :, 1]
  scales = _padded(scale, 1, columns)
  scales = tf.reshape(scales, [scale.shape[0], -1, columns])
  scales = tf.bitcast(tf.transpose(scales, [1, 0, 2]), tf.uint8)
  scales = tf.reshape(scales, [*numbers.shape[:2], -1])
  return _bytes(tf.concat([numbers, scales], 2))


def _panels(w, columns, together):
  # [panels, inner / together, columns, together]: as many inner indices of a
  # column lie together as four bytes have.
  w = _padded(_padded(w, 0, GROUP), 1, columns)
  inner, outer = w.shape
  w = tf.reshape(w, [inner // together, together, outer // columns, columns])
  return tf.transpose(w, [2, 0, 3, 1])


def _padded(x, axis, multiple):
  paddings = np.zeros([x.shape.rank, 2], int)
  paddings[axis, 1] = -x.shape[axis] % multiple
  return tf.pad(x, paddings)


def _bytes(panels):
  if panels.dtype != tf.uint8:
    panels = tf.bitcast(panels, tf.uint8)
  return tf.reshape(panels, [panels.shape[0], -1])
