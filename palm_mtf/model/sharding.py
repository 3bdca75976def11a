# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""One dimension by another name, under which a layout splits it otherwise.

  d_model_stored -> d_model    a weight is gathered before it is used
  d_model -> d_model_stored    its gradient is summed up and cut on the way back
  d_model_residual -> d_model  the same two for the residual stream, where a
  d_model -> d_model_residual  block begins and where it ends

To gather is an all-gather over the first name's axis. The other way, a sum
whose parts lie on the devices of that axis is finished by a reduce-scatter:
half the bytes of the all-reduce that Mesh TensorFlow's reshape makes before it
cuts. A value that these devices hold already is cut where it is. Each is the
gradient of the other.

A kernel is gathered for one product at a time, when the other factor is there,
and again on the way back: all kernels at once would be what was saved. So its
gradient is cut in each microbatch, and added up in parts: that moves it once a
microbatch and not once a step, and keeps a whole gradient nowhere.
"""

from palm_mtf._tf import mtf
from palm_mtf.model.dims import Dims
from palm_mtf.model.remat import recomputed


class Resharded(mtf.Operation):
  """Outputs its first input with one dimension renamed."""

  def __init__(
    self,
    x: mtf.Tensor,
    dims: tuple[mtf.Dimension, mtf.Dimension],
    after: mtf.Tensor | None = None,
  ):
    """Adds the operation to the graph of x.

    Args:
      x: has the first of `dims`.
      dims: what is renamed, and what to.
      after: not before this tensor is there does anything move.
    """
    inputs = [x] if after is None else [x, after]
    super().__init__(inputs, name=f"as_{dims[1].name}")
    self._dims = dims
    shape = [dims[1] if dim == dims[0] else dim for dim in x.shape.dims]
    self._outputs = [mtf.Tensor(self, mtf.Shape(shape), x.dtype)]

  def gradient(self, grad_ys: list[mtf.Tensor]) -> list[mtf.Tensor | None]:
    """Returns the gradient of x; `after` has none."""
    dx = Resharded(grad_ys[0], self._dims[::-1]).outputs[0]
    return [dx, None][: len(self.inputs)]

  def lower(self, lowering: mtf.Lowering) -> None:
    """Lowers to one collective at most."""
    mesh_impl = lowering.mesh_impl(self)
    x, *after = (lowering.tensors[each] for each in self.inputs)
    if after:
      x = mesh_impl.after(x, *after)
    before, then = map(mesh_impl.tensor_dimension_to_mesh_axis, self._dims)
    place = self.inputs[0].shape.dims.index(self._dims[0])
    if before is not None:
      x = mesh_impl.allconcat(x, before, place)  # all-gather
    if then is not None:
      x = _summed_and_cut(mesh_impl, x, then, place)
    lowering.set_tensor_lowering(self.outputs[0], x)


def _summed_and_cut(mesh_impl, x, axis, place):
  if not (isinstance(x, mtf.LazyAllreduceSum) and axis in x.mesh_axes):
    return mesh_impl.allsplit(x, axis, place)
  part = mesh_impl.reduce_scatter(x.laid_out_input, axis, place)
  others = [each for each in x.mesh_axes if each != axis]
  return mtf.LazyAllreduceSum(mesh_impl, part, others) if others else part


def gathered(x: mtf.Tensor, after: mtf.Tensor, dims: Dims) -> mtf.Tensor:
  """Returns a stored weight as layers use it, in its dtype.

  Args:
    x: [..., d_model_stored, ...].
    after: what the layer reads besides: the weight is gathered only then.
    dims: dimensions of the model; where no layout splits d_model_stored, x is
    returned.
  """
  if dims.d_model_stored == dims.d_model:
    return x
  return Resharded(x, (dims.d_model_stored, dims.d_model), after).outputs[0]


def gathered_einsum(
  x: mtf.Tensor,
  kernel: mtf.Tensor,
  output_shape: list[mtf.Dimension],
  dims: Dims,
  *,
  again: bool,
) -> mtf.Tensor:
  """Multiplies by a stored kernel, which is gathered for this product alone.

  Args:
    x: [..., in_dims].
    kernel: with d_model_stored in place of d_model.
    output_shape: shape of the product.
    dims: dimensions of the model.
    again: whether the backward pass gathers the kernel once more, so that it is
      not kept until then.
  """

  def multiply(x: mtf.Tensor) -> mtf.Tensor:
    return mtf.einsum([x, gathered(kernel, x, dims)], output_shape=output_shape)

  is_split = dims.d_model_stored != dims.d_model
  return recomputed(multiply, [x]) if is_split and again else multiply(x)


def as_residual(x: mtf.Tensor, dims: Dims) -> mtf.Tensor:
  """Returns [batch, length, d_model] as it lies between blocks."""
  return _renamed(x, dims.d_model, dims.d_model_residual)


def from_residual(x: mtf.Tensor, dims: Dims) -> mtf.Tensor:
  """Returns [batch, length, d_model_residual] as a block reads it."""
  return _renamed(x, dims.d_model_residual, dims.d_model)


def _renamed(x, old, new):
  return x if old == new else Resharded(x, (old, new)).outputs[0]
