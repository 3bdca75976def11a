# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sums over pods (copies of the model), sent over the data-center network.

pod 0, device i    slice i --------+--> slice i of 0 + slice i of 1
                                    X
pod 1, device i    slice i --------+--> slice i of 0 + slice i of 1
"""

import math
from collections.abc import Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.ops.slicewise import split_axes
from palm_mtf.ops.xla import fused

# Each device sends its gradients only to the device with the same index in
# every other pod. The transfer is an edge of the graph, so TensorFlow sends a
# gradient as soon as it is computed, during the rest of the backward pass.


def sum_in_order(*terms: tf.Tensor) -> tf.Tensor:
  """Adds up `terms`, one tensor per pod; returns a float32 tensor."""
  # All pods add the terms in the same order, so all sums have the same bits.
  if len(terms) == 2 and terms[0].dtype == tf.float32:
    return terms[0] + terms[1]  # one pass over memory, with nothing to compile
  return _cast_and_add(*terms)


@fused
def _cast_and_add(*terms):
  total = tf.cast(terms[0], tf.float32)
  for term in terms[1:]:
    total += tf.cast(term, tf.float32)
  return total


class OwnPart(mtf.Operation):
  """Cuts a slice that several devices hold into one part per device.

  Each device outputs its part, a vector whose length depends on the layout. The
  output is declared with the input's shape, although its slices are vectors.
  Only operations that work on slices, such as Exchange, may read the output.
  """

  # Several devices of a pod hold the same gradient. Each of these devices sends
  # only its own part to other pods, because the network between pods is slow:
  #   within the pod    reduce-scatter, if the gradient is a LazyAllreduceSum
  #   between pods      exchange of own parts (Exchange)
  #   within the pod    all-gather of own parts (OwnPart.whole)
  # Within the pod, the two collectives move as many bytes as an all-reduce.

  def __init__(self, x: mtf.Tensor, dtype: tf.DType):
    # `dtype` is the dtype in which pods send the parts of the gradient x.
    super().__init__([x], name="own_part")
    self._axes: list[int] = []
    self._outputs = [mtf.Tensor(self, x.shape, dtype)]

  def lower(self, lowering: mtf.Lowering) -> None:
    """Cuts slices over all mesh axes along which devices hold equal slices."""
    mesh_impl = lowering.mesh_impl(self)
    x = lowering.tensors[self.inputs[0]]
    is_open = isinstance(x, mtf.LazyAllreduceSum)
    part = x.laid_out_input if is_open else x
    summed = x.mesh_axes if is_open else []
    # Cut first over the axes that need no reduce-scatter, so that the slices
    # sent by a reduce-scatter are shorter.
    self._axes = sorted(
      _copy_axes(mesh_impl, self.inputs[0].shape),
      key=lambda axis: axis in summed,
    )
    if self._axes:
      copies = math.prod(mesh_impl.shape[axis].size for axis in self._axes)
      part = mesh_impl.slicewise(_flatten, part, copies)
    for axis in self._axes:
      # Over an axis of a LazyAllreduceSum, the cut is a reduce-scatter. Over
      # another axis, each device keeps its part of the slice and sends nothing.
      cut = mesh_impl.reduce_scatter if axis in summed else mesh_impl.allsplit
      part = cut(part, axis, 0)
    # `set_tensor_lowering` would refuse a part, because a part does not have
    # the shape of the output's slices.
    lowering.tensors[self.outputs[0]] = mesh_impl.slicewise(
      tf.cast, part, self.outputs[0].dtype
    )

  def whole(self, mesh_impl: mtf.MeshImpl, part: object) -> object:
    """Gathers each device's part; returns whole slices on all devices."""
    if not self._axes:
      return part
    for axis in reversed(self._axes):
      part = mesh_impl.allconcat(part, axis, 0)
    size = mesh_impl.slice_shape(self.outputs[0].shape)
    return mesh_impl.slicewise(
      lambda x: tf.reshape(x[: math.prod(size)], size), part
    )


def _copy_axes(mesh_impl: mtf.MeshImpl, shape: mtf.Shape) -> list[int]:
  """Returns the mesh axes along which devices hold equal slices of a tensor."""
  split = split_axes(mesh_impl, shape.dims)
  return [
    axis
    for axis, dim in enumerate(mesh_impl.shape.dims)
    if axis not in split and dim.size > 1
  ]


def _flatten(x: tf.Tensor, num_parts: int) -> tf.Tensor:
  x = tf.reshape(x, [-1])
  rest = -x.shape[0] % num_parts
  return tf.pad(x, [[0, rest]]) if rest else x  # for parts of equal length


class Exchange(mtf.Operation):
  """Outputs the float32 sum of all pods' tensors, on the mesh of one pod."""

  def __init__(
    self,
    terms: Sequence[mtf.Tensor],
    mesh: mtf.Mesh,
    own: OwnPart | None = None,
  ):
    """Adds up `terms` for the pod with the mesh `mesh`.

    Args:
      terms: one tensor per pod, in the pods' order; equal shapes and dtypes.
      own: this pod's OwnPart if the terms are outputs of OwnParts; else None.
    """
    super().__init__(list(terms), mesh=mesh, name="exchange")
    self._own = own
    self._outputs = [mtf.Tensor(self, terms[0].shape, tf.float32)]

  def lower(self, lowering: mtf.Lowering) -> None:
    """Lowers to a sum of one slice per pod, on each device."""
    mesh_impl = lowering.mesh_impl(self)
    # A term that is a LazyAllreduceSum is all-reduced within its pod.
    terms = [lowering.tensors[x].to_laid_out_tensor() for x in self.inputs]
    # Device i of every other pod sends its slice to device i of this pod.
    self.lower_sum(lowering, mesh_impl.slicewise(sum_in_order, *terms))

  def lower_sum(self, lowering: mtf.Lowering, total: object) -> None:
    """Sets the output to `total`, gathered if `total` is a sum of own parts."""
    if self._own:
      total = self._own.whole(lowering.mesh_impl(self), total)
    lowering.set_tensor_lowering(self.outputs[0], total)
