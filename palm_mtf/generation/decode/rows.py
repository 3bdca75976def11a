# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensors with the rows of a batch, split over the devices of a mesh."""

from collections.abc import Sequence

from palm_mtf._tf import gen_xla_ops, mtf, tf
from palm_mtf.ops.placement import LaidOut, Placement
from palm_mtf.ops.xla import in_xla_computation

# A cache holds the rotated keys of layer 0, the values of layer 0, the rotated
# keys of layer 1, and so on. On accelerators (`has_stacks`) a cache holds two
# tensors, [layers, ...] each: the keys of all layers, the values of all layers.
Cache = list[LaidOut]
# Tensors, such as a cache, that a decoding function returns for a later call.
State = list[LaidOut]


# Returns the mtf shape of a tensor [rows, *others]. A layout may split only the
# rows, named `batch`. An unknown size of another dimension becomes 1, because
# `join_rows` does not use this size.
def _make_shape(rows: int, others: list[int | None]) -> mtf.Shape:
  dims = [mtf.Dimension(f"unsplit_{i}", n or 1) for i, n in enumerate(others)]
  return mtf.Shape([mtf.Dimension("batch", rows), *dims])


def split_rows(placement: Placement, x: tf.Tensor) -> LaidOut:
  """Gives each device of a mesh its rows of a tensor [batch, ...]."""
  rows, *others = x.shape.as_list()
  shape = _make_shape(rows, others)
  return placement.LaidOutTensor(placement.make_slices(x, shape))


def join_rows(placement: Placement, x: LaidOut) -> tf.Tensor:
  """Joins the slices of a laid-out tensor into one tensor [batch, ...]."""
  rows, *others = x.tensor_list[0].shape.as_list()
  axis = placement.tensor_dimension_to_mesh_axis(mtf.Dimension("batch", 1))
  slices = 1 if axis is None else placement.shape[axis].size
  shape = _make_shape(rows * slices, others)
  return placement.combine_slices(x.tensor_list, shape)


def repeat(x: tf.Tensor, times: int, axis: int = 0) -> tf.Tensor:
  """Repeats each row (along `axis`) `times` times; its copies are adjacent."""
  return x if times == 1 else tf.repeat(x, times, axis=axis)


def write_row(
  x: tf.Tensor, row: tf.Tensor, value: tf.Tensor, axis: int
) -> tf.Tensor:
  """Returns x with the beginning of one row replaced; copies nothing.

  Args:
    x: changed in place, so nothing else may read x.
    row: index of the row, [] int32.
    value: has size 1 in dimension `axis`. In others but the last it may be
      smaller than x: the rest of the row stays.
    axis: dimension of x that `row` indexes; 0 outside of an XLA computation.
  """
  if in_xla_computation():
    begin = [row if i == axis else 0 for i in range(x.shape.rank)]
    return gen_xla_ops.xla_dynamic_update_slice(x, value, tf.stack(begin))
  assert axis == 0
  if value.shape[1:] == x.shape[1:]:
    return tf.raw_ops.InplaceUpdate(x=x, i=row[tf.newaxis], v=value)
  places = row
  for size, whole in zip(value.shape[1:-1], x.shape[1:-1], strict=True):
    places = places[..., tf.newaxis] * whole + tf.range(size)
  return write_places(x, tf.reshape(places, [-1]), value)


def write_places(
  x: tf.Tensor, places: tf.Tensor, values: tf.Tensor
) -> tf.Tensor:
  """Returns x with some of its vectors replaced by `values`; copies nothing.

  Args:
    x: [..., d]; changed in place, so nothing else may read x.
    places: [n], int32: different row indices of x reshaped to [vectors, d].
    values: the n new vectors, in any shape that reshapes to [n, d].
  """
  size = x.shape[-1]
  flat, values = (tf.reshape(y, [-1, size]) for y in (x, values))
  # Outside of an XLA computation, TensorFlow's scatter would copy all vectors,
  # which costs more than the rest of a step. XLA scatters in place.
  if in_xla_computation():
    flat = tf.tensor_scatter_nd_update(flat, places[:, tf.newaxis], values)
  else:
    flat = tf.raw_ops.InplaceUpdate(x=flat, i=places, v=values)
  return tf.reshape(flat, x.shape)


def have_ended(placement: Placement, is_over: LaidOut) -> tf.Tensor:
  """Returns whether `is_over`, [rows] bool, is true on all devices, [] bool."""
  here = [tf.reduce_all(x) for x in is_over.tensor_list]
  if len(here) == placement.size:
    return tf.reduce_all(tf.stack(here))
  # On accelerators, each device knows only its own rows, so ask all devices.
  axes = list(range(placement.shape.ndims))
  ended = placement.LaidOutTensor([tf.cast(here[0], tf.int32)])
  return placement.allreduce(ended, axes, "MIN").tensor_list[0] > 0


def flatten(xs: Sequence[LaidOut]) -> list[tf.Tensor]:
  """Returns the slices of all tensors; tf.while_loop can carry only these."""
  return [part for x in xs for part in x.tensor_list]


def unflatten(
  placement: Placement, flat: Sequence[tf.Tensor], num_slices: int
) -> list[LaidOut]:
  """Undoes `flatten`: joins each `num_slices` slices to a laid-out tensor."""
  return [
    placement.LaidOutTensor(list(flat[i : i + num_slices]))
    for i in range(0, len(flat), num_slices)
  ]
