# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensors and variables with the rows of a batch, on the devices of a mesh."""

from collections.abc import Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.mesh.cpu_gpu import CpuGpuPlacement

LaidOut = mtf.placement_mesh_impl.PlacementMeshImpl.LaidOutTensor
# A cache holds the rotated keys of layer 0, the values of layer 0, the rotated
# keys of layer 1, and so on.
Cache = list[LaidOut]


# If a layout splits `batch`, a device holds a slice of the rows, otherwise all
# rows. No other dimension is split, so a dimension of unknown size can have
# size 1 here.
def _make_shape(rows: int, others: list[int | None]) -> mtf.Shape:
  dims = [mtf.Dimension(f"unsplit_{i}", n or 1) for i, n in enumerate(others)]
  return mtf.Shape([mtf.Dimension("batch", rows), *dims])


def split_rows(placement: CpuGpuPlacement, x: tf.Tensor) -> LaidOut:
  """Splits a tensor [batch, ...] into the slices of a mesh's devices."""
  rows, *others = x.shape.as_list()
  shape = _make_shape(rows, others)
  return placement.LaidOutTensor(placement.make_slices(x, shape))


def join_rows(placement: CpuGpuPlacement, x: LaidOut) -> tf.Tensor:
  """Joins the slices of a laid-out tensor into one tensor [batch, ...]."""
  rows, *others = x.tensor_list[0].shape.as_list()
  axis = placement.tensor_dimension_to_mesh_axis(mtf.Dimension("batch", 1))
  slices = 1 if axis is None else placement.shape[axis].size
  shape = _make_shape(rows * slices, others)
  return placement.combine_slices(x.tensor_list, shape)


def repeat(x: tf.Tensor, times: int) -> tf.Tensor:
  """Repeats each row `times` times; the copies of a row are adjacent."""
  return x if times == 1 else tf.repeat(x, times, axis=0)


def read_all(
  placement: CpuGpuPlacement, variables: Sequence[LaidOut]
) -> list[LaidOut]:
  """Returns the values of variables, on every device."""
  return [
    placement.slicewise(lambda v: v.read_value(), each) for each in variables
  ]


def assign_all(
  variables: Sequence[LaidOut], values: Sequence[LaidOut]
) -> tf.Operation:
  """Assigns values to variables, on every device."""
  return tf.group(
    [
      variable.assign(value, read_value=False)
      for pair in zip(variables, values, strict=True)
      for variable, value in zip(*(x.tensor_list for x in pair), strict=True)
    ]
  )
