# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of queries and keys, at any positions."""

from palm_mtf._tf import mtf, tf
from palm_mtf.model.layers import rotary_tables, turned
from palm_mtf.ops.slicewise import WholeSlice
from palm_mtf.ops.xla import fused

_turned = fused(turned)


def rotary_angles(
  length: mtf.Dimension, d_kv: mtf.Dimension, position: mtf.Tensor
) -> list[mtf.Tensor]:
  """Returns sin and cos of the angles at given positions.

  Args:
    length: positions of a whole sequence.
    d_kv: width of a head.
    position: int32, any shape.

  Returns:
    Two tensors [..., d_kv / 2], float32, with the dimensions of `position`.
  """

  # Looked up, where mtf.gather would multiply: a TPU multiplies in bfloat16.
  def look_up(table, position):
    # A sequence that is whole stays in the batch of those that are not.
    return tf.gather(table, tf.minimum(position, length.size - 1))

  angles = []
  # A name of its own, which no layout splits.
  rows = mtf.Dimension("position", length.size)
  for table in rotary_tables(position.mesh, rows, d_kv):
    pairs = table.shape.dims[-1]
    at = WholeSlice(
      look_up,
      [table, position],
      [(position.shape + pairs, table.dtype)],
      splittable=[dim.name for dim in position.shape.dims],
      name="rotary_angles",
    )
    angles += at.outputs
  return angles


def rotated(x: mtf.Tensor, sin: mtf.Tensor, cos: mtf.Tensor) -> mtf.Tensor:
  """Rotates the halves of d_kv against each other.

  Args:
    x: [..., d_kv], queries or keys.
    sin: [..., d_kv / 2], float32, some dimensions of x, in their order.
    cos: shape and dtype of `sin`.

  Returns:
    Shape and dtype of x.
  """
  leading = x.shape.dims[:-1]
  missing = [i for i, dim in enumerate(leading) if dim not in sin.shape.dims]

  def turn(x, sin, cos):
    for axis in missing:
      sin, cos = tf.expand_dims(sin, axis), tf.expand_dims(cos, axis)
    return _turned(x, sin, cos)

  def operation(fn, inputs, gradient=None):
    return WholeSlice(
      fn,
      inputs,
      [(x.shape, x.dtype)],
      splittable=[dim.name for dim in leading],
      gradient=gradient,
      name="rotary",
    ).outputs[0]

  def gradient(op, dy):
    _, *angles = op.inputs  # not those above: it may be computed again
    # Rotated back: by the opposite angles.
    back = operation(lambda dy, sin, cos: turn(dy, -sin, cos), [dy, *angles])
    return [back, None, None]

  return operation(turn, [x, sin, cos], gradient)
