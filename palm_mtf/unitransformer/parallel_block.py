# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The parallel block: attention and MLP read one norm, and are summed."""

from collections.abc import Sequence

import gin
from mesh_tensorflow.transformer import transformer

from palm_mtf._tf import mtf, tf
from palm_mtf.unitransformer.multi_query_attention import MultiQueryAttention
from palm_mtf.unitransformer.swiglu import SwiGlu


@gin.configurable(module="palm_mtf.unitransformer")
class ParallelBlock(transformer.TransformerLayer):
  """Attention(x) + MLP(x), x normalized by the stack that calls it (PaLM 2)."""

  # Mesh TensorFlow's ParallelLayer divides the sum by sqrt(2); PaLM does not.

  def __init__(
    self,
    layer_classes: Sequence[type[transformer.TransformerLayer]] = (
      MultiQueryAttention,
      SwiGlu,
    ),
  ):
    """Makes the layers.

    Args:
      layer_classes: layers that are summed, of which gin sets the arguments.
    """
    self._layers = [layer() for layer in layer_classes]

  def call(
    self,
    context: transformer.Context,
    x: mtf.Tensor,
    losses: list[mtf.Tensor] | None = None,
  ) -> mtf.Tensor:
    """Returns the sum of the layers, shape and dtype of x.

    Args:
      context: positions, masks and the cache of decoding.
      x: [..., d_model], activation dtype, normalized.
      losses: receives what the layers add to the loss.
    """
    branches = []
    for layer in self._layers:
      with tf.variable_scope(type(layer).__name__):
        branches.append(layer.call(context, x, losses=losses))
    return mtf.add_n(branches)
