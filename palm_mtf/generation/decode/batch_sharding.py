# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of a batch, sharded onto the devices of a mesh and joined again."""

from palm_mtf._tf import mtf, tf
from palm_mtf.generation.decode.weights import LaidOut
from palm_mtf.mesh.cpu_gpu import CpuGpuPlacement


def split_rows(placement: CpuGpuPlacement, x: tf.Tensor) -> LaidOut:
  """Returns [batch, ...] on the devices of a mesh."""
  rows, *others = x.shape.as_list()
  shape = _shape(rows, others)
  return placement.LaidOutTensor(placement.make_slices(x, shape))


def join_rows(placement: CpuGpuPlacement, x: LaidOut) -> tf.Tensor:
  """Returns [batch, ...] from the devices of a mesh."""
  rows, *others = x.tensor_list[0].shape.as_list()
  axis = placement.tensor_dimension_to_mesh_axis(mtf.Dimension("batch", 1))
  slices = 1 if axis is None else placement.shape[axis].size
  return placement.combine_slices(x.tensor_list, _shape(rows * slices, others))


# Where a layout splits `batch`, a device holds a slice of the rows, else all of
# them. No other dimension of these tensors is split.
def _shape(rows: int, others: list[int]) -> mtf.Shape:
  dims = [mtf.Dimension(f"unsplit_{i}", n) for i, n in enumerate(others)]
  return mtf.Shape([mtf.Dimension("batch", rows), *dims])
