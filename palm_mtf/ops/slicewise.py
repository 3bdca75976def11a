# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""One Mesh TensorFlow operation that runs one function on each whole slice.

Layers built from small mtf operations pass over memory once an operation. A
`WholeSlice` lowers to one call of a TensorFlow function per slice instead, with
a gradient of its own, and stays correct when its dimensions are split:

* Every dimension named in `splittable` may be split over a mesh axis.
* An output that lacks a split dimension of the inputs is a sum over it: each
  slice computes its own part, and the parts are all-reduced over that axis.

A function that has to know where its slice begins, at a row of the vocabulary
say, names that dimension as `offset_of` and receives the first index as its
first argument. Layers that use it are in model/, the optimizer's in optim/.
"""

from collections.abc import Callable, Sequence

from palm_mtf._tf import mtf, tf

SliceFn = Callable[..., object]
GradientFn = Callable[..., "Sequence[mtf.Tensor | None]"]


def slice_offset(mesh_impl: mtf.MeshImpl, dim: mtf.Dimension) -> object:
  """Returns the first index of `dim` in each slice: [], int32, laid out."""
  axis = mesh_impl.tensor_dimension_to_mesh_axis(dim)
  if axis is None:
    return tf.constant(0)
  size = dim.size // mesh_impl.shape[axis].size
  return mesh_impl.slicewise(
    lambda coordinate: tf.cast(coordinate, tf.int32) * size,
    mesh_impl.laid_out_pcoord(axis),
  )


def split_axes(
  mesh_impl: mtf.MeshImpl, dims: Sequence[mtf.Dimension]
) -> list[int]:
  """Returns the mesh axes over which any of `dims` is split, in order."""
  axes = {mesh_impl.tensor_dimension_to_mesh_axis(dim) for dim in dims}
  return sorted(axis for axis in axes if axis is not None)


class WholeSlice(mtf.Operation):
  """Applies `fn` to each slice of the inputs; see the module's docstring."""

  def __init__(
    self,
    fn: SliceFn,
    inputs: Sequence[mtf.Tensor],
    outputs: Sequence[tuple[mtf.Shape, tf.DType]],
    *,
    splittable: Sequence[str],
    gradient: GradientFn | None = None,
    offset_of: mtf.Dimension | None = None,
    name: str,
  ):
    """Adds the operation to the graph of its inputs.

    Args:
      fn: takes one tf.Tensor per input (after the offset, if any) and returns
        one per output: a tensor, or a tuple when there are several.
      inputs: what it is applied to.
      outputs: the shape and dtype of each output.
      splittable: names of the dimensions that may be split.
      gradient: (operation, gradient of each output) -> gradient of each input,
        None where there is none; without it the operation has no gradient.
      offset_of: the dimension whose first index in the slice `fn` receives.
      name: name of the operation, made unique by the graph.
    """
    super().__init__(list(inputs), name=name)
    self._fn = fn
    self._gradient = gradient
    self._offset_of = offset_of
    self._outputs = [mtf.Tensor(self, shape, dtype) for shape, dtype in outputs]
    self._splittable_dims, self._unsplittable_dims = (
      self._initialize_splittable_and_unsplittable_dims(
        "unsplittable", splittable
      )
    )

  @property
  def has_gradient(self) -> bool:
    """Whether a loss can be traced through it."""
    return self._gradient is not None

  def gradient(self, grad_ys: Sequence[mtf.Tensor | None]) -> Sequence:
    """Returns the gradient of each input, None where there is none."""
    return self._gradient(self, *grad_ys)

  def lower(self, lowering: mtf.Lowering) -> None:
    """Lowers to one call of the function on each slice."""
    mesh_impl = lowering.mesh_impl(self)
    input_dims = {dim for x in self.inputs for dim in x.shape.dims}
    for dim in input_dims:
      if dim.name in self._unsplittable_dims:
        assert not split_axes(mesh_impl, [dim]), f"{self.name}: {dim} is split"
    slices = [lowering.tensors[x] for x in self.inputs]
    if self._offset_of is not None:
      slices.insert(0, slice_offset(mesh_impl, self._offset_of))
    values = mesh_impl.slicewise(self._fn, *slices)
    if len(self.outputs) == 1:
      values = (values,)
    for output, value in zip(self.outputs, values, strict=True):
      summed = split_axes(mesh_impl, list(input_dims - set(output.shape.dims)))
      if summed:  # all-reduce of each slice's part
        value = mtf.LazyAllreduceSum(mesh_impl, value, summed)
      lowering.set_tensor_lowering(output, value)
