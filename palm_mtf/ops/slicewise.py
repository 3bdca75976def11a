# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A Mesh TensorFlow operation that runs one function on each whole slice."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.errors import UserError
from palm_mtf.ops.recompute import delay

SliceFn = Callable[..., object]
# Takes an operation, and its outputs' gradients (or None); returns its inputs'.
GradientFn = Callable[..., "Sequence[mtf.Tensor | None]"]


def slice_offset(mesh_impl: mtf.MeshImpl, dim: mtf.Dimension) -> object:
  """Returns the index in `dim` where each device's slice begins, [] int32."""
  axis = mesh_impl.tensor_dimension_to_mesh_axis(dim)
  if axis is None:
    return tf.constant(0)
  size = dim.size // mesh_impl.shape[axis].size
  index = mesh_impl.laid_out_pcoord(axis)  # of the device along `axis`
  return mesh_impl.slicewise(lambda x: tf.cast(x, tf.int32) * size, index)


def native_threads(mesh_impl: mtf.MeshImpl) -> int:
  """Returns how many threads a C++ operation uses; 0 if devices run none."""
  # Mesh TensorFlow's own mesh implementations lack `native_threads`.
  return getattr(mesh_impl, "native_threads", 0)


def split_axes(
  mesh_impl: mtf.MeshImpl, dims: Sequence[mtf.Dimension]
) -> list[int]:
  """Returns the mesh axes that split any of `dims`, in ascending order."""
  axes = {mesh_impl.tensor_dimension_to_mesh_axis(dim) for dim in dims}
  return sorted(axis for axis in axes if axis is not None)


@dataclasses.dataclass(frozen=True)
class ByDevice:
  """A function of slices: in C++ for CPUs that have it, and in TensorFlow."""

  anywhere: SliceFn  # the function in TensorFlow, for any device
  # The function in C++, or None. Its first argument is the number of threads.
  # It may leave out last outputs, such as attention weights, which only the
  # gradient in TensorFlow reads. A native gradient gets None for such outputs.
  native: SliceFn | None = None

  def of(self, mesh_impl: mtf.MeshImpl) -> SliceFn:
    """Returns the function that the devices of a mesh run."""
    threads = native_threads(mesh_impl)
    if threads and self.native:
      return functools.partial(self.native, threads)
    return self.anywhere


class WholeSlice(mtf.Operation):
  """Applies a TensorFlow function to each slice of the inputs, in one call.

  A layer of small mtf operations would pass over memory once per operation.
  If a layout splits a dimension of the inputs, outputs without this dimension
  are partial sums, which are all-reduced over the mesh axis of the dimension.
  """

  def __init__(
    self,
    fn: "SliceFn | ByDevice",
    inputs: Sequence[mtf.Tensor],
    outputs: Sequence[tuple[mtf.Shape, tf.DType]],
    *,
    splittable: Sequence[str],
    gradient: GradientFn | None = None,
    offset_of: mtf.Dimension | None = None,
    is_kept: bool = True,
    name: str,
  ):
    """Adds the operation to the graph of its inputs.

    Args:
      fn: takes a slice of each input and returns a slice of each output: one
        tensor, or a tuple if there are several outputs.
      inputs: tensors of one mesh, of any shapes and dtypes.
      outputs: shape and dtype of each output.
      splittable: names of the dimensions that a layout may split.
      gradient: computes gradients of the inputs; None if there are none.
      offset_of: dimension (such as the vocabulary) whose first index in the
        slice is passed to `fn` as an extra first argument; None to pass none.
      is_kept: whether outputs are kept for the backward pass; if not, the
        backward pass computes the outputs again (recompute.py).
      name: name of the operation, made unique by the graph.
    """
    super().__init__(list(inputs), name=name)
    self._fn = fn if isinstance(fn, ByDevice) else ByDevice(fn)
    self._gradient = gradient
    self._offset_of = offset_of
    self._is_kept = is_kept
    self._outputs = [mtf.Tensor(self, shape, dtype) for shape, dtype in outputs]
    self._splittable_dims, self._unsplittable_dims = (
      self._initialize_splittable_and_unsplittable_dims(
        "unsplittable", splittable
      )
    )

  @property
  def has_gradient(self) -> bool:
    """Whether gradients pass through the operation."""
    return self._gradient is not None

  def gradient(self, grad_ys: Sequence[mtf.Tensor | None]) -> Sequence:
    """Returns the gradient of each input; None for an input without one."""
    return self._gradient(self, *grad_ys)

  def recompute(self, x: mtf.Tensor, signal: mtf.Tensor) -> mtf.Tensor:
    """Returns output x after `signal`; if not `is_kept`, computes x again."""
    if self._is_kept:
      return delay(x, signal)
    first = self.inputs[0]  # one delayed input delays the whole operation
    _, copies = self.graph.clone_operations(
      [self], {first: delay(first, signal)}
    )
    return copies[x]

  def lower(self, lowering: mtf.Lowering) -> None:
    """Lowers to one call of the function on each slice."""
    mesh_impl = lowering.mesh_impl(self)
    input_dims = {dim for x in self.inputs for dim in x.shape.dims}
    for dim in input_dims:
      if dim.name in self._unsplittable_dims and split_axes(mesh_impl, [dim]):
        raise UserError(
          f"{self.name} needs all of {dim.name}, which the layout splits: take "
          f"{dim.name} out of the layout rules."
        )
    slices = [lowering.tensors.get(x) for x in self.inputs]
    if self._offset_of is not None:
      slices.insert(0, slice_offset(mesh_impl, self._offset_of))
    values = mesh_impl.slicewise(self._fn.of(mesh_impl), *slices)
    if not isinstance(values, tuple):
      values = (values,)
    for output, value in zip(self.outputs, values, strict=False):
      kept = set(output.shape.dimension_names)
      summed = split_axes(
        mesh_impl, [dim for dim in input_dims if dim.name not in kept]
      )
      # If `summed` has axes, each slice is a partial sum. The all-reduce waits
      # until the sum is read, so that a reduce-scatter can replace it.
      if summed:
        value = mtf.LazyAllreduceSum(mesh_impl, value, summed)
      lowering.set_tensor_lowering(output, value)
