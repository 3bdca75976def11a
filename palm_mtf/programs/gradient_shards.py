# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Each device's own part of a gradient that several devices have in common.

Devices of a pod that hold the same weights end with the same gradients. The
network between pods is the slow one: over it each of them sends one part, and
adds up what it receives of that part; within the pod they then tell each other.

A sum that is still open between devices is reduce-scattered, what they have
already is cut, both flat and padded to equal parts; at the end an all-gather
puts the parts together. Both move what an all-reduce does. A gradient of what
is stored split over all axes is an own part as it is.
"""

import math

from palm_mtf._tf import mtf, tf
from palm_mtf.ops.slicewise import split_axes


def _copy_axes(mesh_impl: mtf.MeshImpl, shape: mtf.Shape) -> list[int]:
  """Returns the axes along which devices hold the same slice."""
  split = split_axes(mesh_impl, shape.dims)
  return [
    axis
    for axis, dim in enumerate(mesh_impl.shape.dims)
    if axis not in split and dim.size > 1
  ]


def _flat(x: tf.Tensor, num_parts: int) -> tf.Tensor:
  """Returns all numbers of x, and zeros until they divide into parts."""
  x = tf.reshape(x, [-1])
  rest = -x.shape[0] % num_parts
  return tf.pad(x, [[0, rest]]) if rest else x


class OwnPart(mtf.Operation):
  """Outputs a part of a tensor on each device, another one on each copy.

  How long a part is the layout decides; of the output only slices are to be
  read, by what is lowered later.
  """

  def __init__(self, x: mtf.Tensor, dtype: tf.DType):
    """Takes a gradient, and the dtype that its parts are rounded to."""
    super().__init__([x], name="own_part")
    self._axes: list[int] = []
    self._outputs = [mtf.Tensor(self, x.shape, dtype)]

  def lower(self, lowering: mtf.Lowering) -> None:
    """Lowers to a reduce-scatter for each axis that the input is a sum over."""
    mesh_impl = lowering.mesh_impl(self)
    x = lowering.tensors[self.inputs[0]]
    is_open = isinstance(x, mtf.LazyAllreduceSum)
    part = x.laid_out_input if is_open else x
    summed = x.mesh_axes if is_open else []
    # What is cut first need not be sent.
    self._axes = sorted(
      _copy_axes(mesh_impl, self.inputs[0].shape),
      key=lambda axis: axis in summed,
    )
    if self._axes:
      copies = math.prod(mesh_impl.shape[axis].size for axis in self._axes)
      part = mesh_impl.slicewise(_flat, part, copies)
    for axis in self._axes:
      cut = mesh_impl.reduce_scatter if axis in summed else mesh_impl.allsplit
      part = cut(part, axis, 0)
    # Not set_tensor_lowering, which compares slices with the whole shape.
    lowering.tensors[self.outputs[0]] = mesh_impl.slicewise(
      tf.cast, part, self.outputs[0].dtype
    )

  def whole(self, mesh_impl: mtf.MeshImpl, part: object) -> object:
    """Returns what parts make up: an all-gather for each axis of copies.

    Args:
      mesh_impl: mesh implementation like this mesh's.
      part: laid out: what became of the output.
    """
    if not self._axes:
      return part
    for axis in reversed(self._axes):
      part = mesh_impl.allconcat(part, axis, 0)
    size = mesh_impl.slice_shape(self.outputs[0].shape)
    return mesh_impl.slicewise(
      lambda x: tf.reshape(x[: math.prod(size)], size), part
    )
