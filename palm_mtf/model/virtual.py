# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Virtual positions: the first positions of a document, which an adapter has.

Their embeddings (ADAPTER = "prompt"; Lester et al. 2021), or their keys and
values in each layer ("prefix"; Li and Liang 2021), are rows of trained tables.
"""

from collections.abc import Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.rotary import Rotary, find_magnitude
from palm_mtf.model.positions import positions_of, rotate_pairs
from palm_mtf.ops.slicewise import WholeSlice


def put_virtual(
  x: mtf.Tensor,
  table: mtf.Tensor,
  segments: mtf.Tensor | None,
  rotary: Rotary | None = None,
  angles: Sequence[mtf.Tensor] = (),
) -> mtf.Tensor:
  """Replaces x at the first positions of each document by rows of a table.

  Args:
    x: [batch, length, ...], activation dtype.
    table: [virtual, ...], activation dtype: keys are rotated by their positions
      in the document.
    segments: [batch, length], int32: number of each position's document. None
      means one document per row.
    rotary, angles: how keys are rotated, and `rotary_tables`; a document that
      does not begin its row has keys that are rotated further.
  """
  others = [] if segments is None else [segments]
  num_rows, is_turned = table.shape.dims[0].size, bool(rotary and others)
  others += angles if is_turned else []

  def find(x, *segments):
    # Returns each position's row, and whether it is virtual, in the rank of x.
    at = positions_of(x, *segments)
    ones = [1] * (x.shape.rank - 2)
    return at, tf.reshape(at < num_rows, [*at.shape, *ones])

  def turn(rows, at, sign, angles):
    # The angles count from the start of the row, so rotate by the document's.
    if not is_turned:
      return rows
    start = tf.range(rows.shape[1]) - at
    sin, cos = (tf.gather(t, start) / find_magnitude(rotary) for t in angles)
    if rows.shape.rank > 3:  # there are several heads
      sin, cos = sin[:, :, tf.newaxis], cos[:, :, tf.newaxis]
    return rotate_pairs(rows, sign * sin, cos, rotary)

  def forward(x, table, *others):
    at, is_virtual = find(x, *others[:1])
    rows = tf.gather(table, tf.minimum(at, num_rows - 1))
    return tf.where_v2(is_virtual, turn(rows, at, 1, others[1:]), x)

  def backward(dy, *others):
    at, is_virtual = find(dy, *others[:1])
    drows = turn(tf.cast(dy, tf.float32), at, -1, others[1:])
    # unsorted_segment_sum ignores segment -1.
    row = tf.broadcast_to(tf.where_v2(at < num_rows, at, -1), dy.shape[:2])
    dtable = tf.math.unsorted_segment_sum(drows, row, num_rows)
    dx = tf.where_v2(is_virtual, tf.zeros_like(dy), dy)
    return dx, tf.cast(dtable, table.dtype)

  def gradient(op, dy):
    found = WholeSlice(
      backward,
      [dy, *op.inputs[2:]],
      [(x.shape, x.dtype), (table.shape, table.dtype)],
      splittable=["batch", "heads"],
      name="virtual_gradient",
    ).outputs
    return [*found, *(None for _ in others)]

  return WholeSlice(
    forward,
    [x, table, *others],
    [(x.shape, x.dtype)],
    splittable=["batch", "heads"],
    gradient=gradient,
    name="virtual",
  ).outputs[0]
