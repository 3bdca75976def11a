# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The MLP: (swish(x wi_gate) * (x wi)) wo."""

import gin
from mesh_tensorflow.transformer import transformer

from palm_mtf._tf import mtf, tf
from palm_mtf.errors import check_count
from palm_mtf.model.layers import gated, gated_gradient
from palm_mtf.ops.slicewise import WholeSlice
from palm_mtf.ops.xla import fused
from palm_mtf.unitransformer.one_model import check_one_model

_gated, _gated_gradient = fused(gated), fused(gated_gradient)


@gin.configurable(module="palm_mtf.unitransformer")
class SwiGlu(transformer.TransformerLayer):
  """MLP with SwiGLU activation and no biases (PaLM 2)."""

  def __init__(self, d_ff: int):
    """Takes the width.

    Args:
      d_ff: hidden width, 4 * d_model in PaLM.

    Raises:
      UserError: `d_ff` is no positive whole number.
    """
    check_count("SwiGlu.d_ff", d_ff)
    self._d_ff = mtf.Dimension("d_ff", d_ff)

  def call(
    self,
    context: transformer.Context,
    x: mtf.Tensor,
    losses: list[mtf.Tensor] | None = None,
  ) -> mtf.Tensor:
    """Returns the MLP of x.

    Args:
      context: says the dtypes of variables.
      x: [..., d_model], activation dtype, normalized.
      losses: not added to.

    Returns:
      Shape and dtype of x.
    """
    del losses
    check_one_model(context)
    gate = _product(context, x, "wi_gate", self._d_ff)
    linear = _product(context, x, "wi", self._d_ff)
    return _product(
      context, _activated(gate, linear), "wo", context.model.model_dim
    )


def _product(
  context: transformer.Context,
  x: mtf.Tensor,
  name: str,
  output: mtf.Dimension,
) -> mtf.Tensor:
  """Multiplies x [..., inputs] by a kernel of this name: [..., output]."""
  inputs = x.shape.dims[-1]
  kernel = mtf.get_variable(
    context.mesh,
    name,
    mtf.Shape([inputs, output]),
    initializer=tf.random_normal_initializer(stddev=inputs.size**-0.5),
    dtype=context.variable_dtype,
  )
  return mtf.einsum([x, kernel], reduced_dims=[inputs])


def _activated(gate: mtf.Tensor, linear: mtf.Tensor) -> mtf.Tensor:
  """Returns swish(gate) * linear."""
  shape, dtype = linear.shape, linear.dtype
  splittable = [dim.name for dim in shape.dims]  # it is element by element

  def gradient(op, dy):
    return WholeSlice(
      _gated_gradient,
      [*op.inputs, dy],
      [(shape, dtype), (shape, dtype)],
      splittable=splittable,
      name="swiglu_gradient",
    ).outputs

  return WholeSlice(
    _gated,
    [gate, linear],
    [(shape, dtype)],
    splittable=splittable,
    gradient=gradient,
    name="swiglu",
  ).outputs[0]
