# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Each device's own part of a gradient that several devices have in common.

Devices of a pod that hold the same weights end with the same gradients. The
network between pods is the slow one: over it each of them sends one part, and
receives what is added up of that part; within the pod they then tell each other.

  OwnPart    a sum whose parts lie on several devices is reduce-scattered, what
             they have already is cut; flat, padded to equal parts
  Reunited   all-gathers the parts and gives them their shape again

Both together move what an all-reduce does. A gradient of weights that are stored
split over all axes is an own part as it is.
"""

import math

from palm_mtf._tf import mtf, tf
from palm_mtf.whole_slice import split_axes

# No layout splits it: what differs from device to device is the contents.
_NAME = "own_part"


def _copy_axes(mesh_impl: mtf.MeshImpl, shape: mtf.Shape) -> list[int]:
  """Returns the axes along which devices hold the same slice."""
  split = split_axes(mesh_impl, shape.dims)
  return [
    axis
    for axis, dim in enumerate(mesh_impl.shape.dims)
    if axis not in split and dim.size > 1
  ]


class OwnPart(mtf.Operation):
  """Outputs a part of a tensor on each device, another one on each copy.

  Attributes:
    axes: of the mesh, over which it is cut in order; there when it is lowered.
  """

  def __init__(self, x: mtf.Tensor):
    super().__init__([x], name=_NAME)
    self.axes: list[int] = []
    # Of the parts' size the layout decides; nobody asks for it.
    self._outputs = [
      mtf.Tensor(self, mtf.Shape([mtf.Dimension(_NAME, x.size)]), x.dtype)
    ]

  def lower(self, lowering: mtf.Lowering) -> None:
    """Lowers to a reduce-scatter for each axis that the input is a sum over."""
    mesh_impl = lowering.mesh_impl(self)
    x = lowering.tensors[self.inputs[0]]
    is_open = isinstance(x, mtf.LazyAllreduceSum)
    part = x.laid_out_input if is_open else x
    summed = x.mesh_axes if is_open else []
    # What is cut first need not be sent.
    self.axes = sorted(
      _copy_axes(mesh_impl, self.inputs[0].shape),
      key=lambda axis: axis in summed,
    )
    copies = math.prod(mesh_impl.shape[axis].size for axis in self.axes)

    def flat(x):
      x = tf.reshape(x, [-1])
      return tf.pad(x, [[0, -x.shape[0] % copies]])

    part = mesh_impl.slicewise(flat, part)
    for axis in self.axes:
      cut = mesh_impl.reduce_scatter if axis in summed else mesh_impl.allsplit
      part = cut(part, axis, 0)
    lowering.set_tensor_lowering(self.outputs[0], part)


class Reunited(mtf.Operation):
  """Outputs the tensor whose own parts these are, in their dtype."""

  def __init__(self, part: mtf.Tensor, own: OwnPart):
    """Takes what became of the output of `own`."""
    super().__init__([part], mesh=part.mesh, name="reunited")
    self._own = own
    self._outputs = [mtf.Tensor(self, own.inputs[0].shape, part.dtype)]

  def lower(self, lowering: mtf.Lowering) -> None:
    """Lowers to an all-gather for each axis that has copies."""
    mesh_impl = lowering.mesh_impl(self)
    part = lowering.tensors[self.inputs[0]]
    for axis in reversed(self._own.axes):
      part = mesh_impl.allconcat(part, axis, 0)
    size = mesh_impl.slice_shape(self.outputs[0].shape)
    whole = mesh_impl.slicewise(
      lambda x: tf.reshape(x[: math.prod(size)], size), part
    )
    lowering.set_tensor_lowering(self.outputs[0], whole)
