# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The norm before a layer and behind the last one."""

import gin
from mesh_tensorflow.transformer import transformer

from palm_mtf._tf import mtf, tf
from palm_mtf.errors import check_choice
from palm_mtf.model.layers import norm as normalize
from palm_mtf.unitransformer.one_model import check_one_model


@gin.configurable(module="palm_mtf.unitransformer")
def sublayer_norm(
  x: mtf.Tensor,
  layer_stack: transformer.LayerStack,
  context: transformer.Context,
  norm: str = "layer_norm",
) -> mtf.Tensor:
  """Normalizes over d_model, without bias; a sublayer of a LayerStack.

  Args:
    x: [..., d_model], activation dtype.
    layer_stack: the stack that calls it; not read.
    context: says the dtypes of variables.
    norm: "layer_norm" or "rms_norm", as NORM.

  Returns:
    Shape and dtype of x.

  Raises:
    UserError: `norm` is neither.
  """
  del layer_stack
  check_choice("sublayer_norm.norm", norm, ["layer_norm", "rms_norm"])
  check_one_model(context)
  dtypes = context.variable_dtype
  with tf.variable_scope("norm"):
    scale = mtf.get_variable(
      context.mesh,
      "scale",
      mtf.Shape([context.model.model_dim]),
      initializer=tf.ones_initializer(),
      # The norm is computed in float32, its scale too.
      dtype=mtf.VariableDType(
        dtypes.master_dtype, dtypes.slice_dtype, tf.float32
      ),
    )
  return normalize(x, scale, norm)
