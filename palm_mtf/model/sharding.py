# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Collectives along d_model, if the layout splits d_model.

d_model_stored -> d_model    all-gather of a weight before it is used
d_model -> d_model_stored    reduce-scatter of the weight's gradient
d_model_residual -> d_model  all-gather of the residual stream before a block
d_model -> d_model_residual  reduce-scatter of the residual stream after a block
"""

from palm_mtf._tf import mtf
from palm_mtf.model.dims import Dims
from palm_mtf.ops.recompute import recompute


class Resharded(mtf.Operation):
  """Renames a dimension of x, and reshards x by the new name's layout rule."""

  def __init__(
    self,
    x: mtf.Tensor,
    dims: tuple[mtf.Dimension, mtf.Dimension],
    after: mtf.Tensor | None = None,
  ):
    # `dims` is (old, new). Resharding only after `after` exists saves memory.
    inputs = [x] if after is None else [x, after]
    super().__init__(inputs, name=f"as_{dims[1].name}")
    self._dims = dims
    shape = [dims[1] if dim == dims[0] else dim for dim in x.shape.dims]
    self._outputs = [mtf.Tensor(self, mtf.Shape(shape), x.dtype)]

  def gradient(self, grad_ys: list[mtf.Tensor]) -> list[mtf.Tensor | None]:
    """Returns the gradient of x; the tensor `after` has none."""
    # All-gather and reduce-scatter are each other's gradient.
    dx = Resharded(grad_ys[0], self._dims[::-1]).outputs[0]
    return [dx, None][: len(self.inputs)]

  def lower(self, lowering: mtf.Lowering) -> None:
    """Lowers to one collective at most."""
    mesh_impl = lowering.mesh_impl(self)
    x, *after = (lowering.tensors[each] for each in self.inputs)
    if after:
      x = mesh_impl.delay(x, *after)
    before, then = map(mesh_impl.tensor_dimension_to_mesh_axis, self._dims)
    place = self.inputs[0].shape.dims.index(self._dims[0])
    if before is not None:
      x = mesh_impl.allconcat(x, before, place)
    if then is not None:
      x = _sum_and_cut(mesh_impl, x, then, place)
    lowering.set_tensor_lowering(self.outputs[0], x)


class _Gathered(Resharded):
  """Gathers a weight; the backward pass gathers it again, to save memory."""

  def recompute(self, x: mtf.Tensor, signal: mtf.Tensor) -> mtf.Tensor:
    del x  # there is only one output to recompute
    stored = recompute(self.inputs[0], signal)
    return Resharded(stored, self._dims, signal).outputs[0]


def _sum_and_cut(mesh_impl, x, axis, place):
  if not (isinstance(x, mtf.LazyAllreduceSum) and axis in x.mesh_axes):
    # Devices along `axis` hold equal values, so each only cuts out its part.
    return mesh_impl.allsplit(x, axis, place)
  # mtf.reshape would all-reduce and cut; reduce-scatter moves half the bytes.
  part = mesh_impl.reduce_scatter(x.laid_out_input, axis, place)
  others = [each for each in x.mesh_axes if each != axis]
  return mtf.LazyAllreduceSum(mesh_impl, part, others) if others else part


def gather_weight(x: mtf.Tensor, after: mtf.Tensor, dims: Dims) -> mtf.Tensor:
  """All-gathers a weight [..., d_model_stored, ...] to [..., d_model, ...].

  Returns x itself if no rule splits its d_model, or it has none. The gather
  waits for `after`, the other input of the layer; otherwise TensorFlow
  might gather the weights of all layers at once.
  """
  if dims.d_model in x.shape.dims or dims.d_model_stored not in x.shape.dims:
    return x
  return _Gathered(x, (dims.d_model_stored, dims.d_model), after).outputs[0]


def to_residual(x: mtf.Tensor, dims: Dims) -> mtf.Tensor:
  """Returns x [batch, length, d_model] as [batch, length, d_model_residual]."""
  return _rename(x, dims.d_model, dims.d_model_residual)


def from_residual(x: mtf.Tensor, dims: Dims) -> mtf.Tensor:
  """Returns x [batch, length, d_model_residual] as [batch, length, d_model]."""
  return _rename(x, dims.d_model_residual, dims.d_model)


def _rename(x, old, new):
  return x if old == new else Resharded(x, (old, new)).outputs[0]
