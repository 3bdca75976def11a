# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights in the order in which products.h reads them."""

import dataclasses
from collections.abc import Sequence

from palm_mtf._tf import tf
from palm_mtf.machine.cores import usable_cores
from palm_mtf.native.build import panel_columns
from palm_mtf.native.operations import operations

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


def pack(
  ws: Sequence[tf.Tensor],
  dtype: tf.DType,
  *,
  joins_rows: bool = False,
  is_transposed: bool = False,
  is_rounded: bool = False,
) -> PackedKernel:
  """Packs a matrix; nothing of its size is in memory but its parts and panels.

  Args:
    ws: parts of the matrix, [inner, outer], float32: side by side.
    dtype: one of FORMATS. int8 has a scale for each column, int4 one for each
      GROUP inner indices of a column.
    joins_rows: whether parts lie below each other.
    is_transposed: whether a part is [outer, inner].
    is_rounded: whether numbers are rounded to bfloat16 first.
  """
  parts = [w.shape[::-1] if is_transposed else w.shape for w in ws]
  inners, outers = ([int(x) for x in some] for some in zip(*parts, strict=True))
  inner = sum(inners) if joins_rows else inners[0]
  outer = outers[0] if joins_rows else sum(outers)
  panels = operations().palm_pack(
    ws=list(ws),
    format=FORMATS.index(dtype),
    joins_rows=joins_rows,
    is_transposed=is_transposed,
    is_rounded=is_rounded,
    threads=usable_cores(),
  )
  columns = panel_columns()
  panels.set_shape([-(-outer // columns), _panel_bytes(dtype, inner, columns)])
  return PackedKernel(panels, outer, dtype)


def _panel_bytes(dtype, inner, columns):
  # As panel_bytes of products.h.
  count = -(-inner // GROUP) * GROUP * columns
  if dtype == INT4:
    return count // 2 + count // GROUP * 2
  return count * dtype.size + (8 * columns if dtype == tf.int8 else 0)
