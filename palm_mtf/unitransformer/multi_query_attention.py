# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Self-attention with one key and value head, and rotary embedding."""

import gin
from mesh_tensorflow.transformer import (
  attention,
  transformer,
  transformer_layers,
)

from palm_mtf._tf import mtf, tf
from palm_mtf.errors import UserError, check_count
from palm_mtf.unitransformer.one_model import check_one_model
from palm_mtf.unitransformer.rotary import rotary_angles, rotated


@gin.configurable(module="palm_mtf.unitransformer")
class MultiQueryAttention(transformer_layers.SelfAttention):
  """Mesh TensorFlow's self-attention with rotary embedding (PaLM 2)."""

  # Its own are the rotation of q and k and the sizes that PaLM has; masks,
  # packed sequences and the cache of decoding are the parent's.

  def __init__(self, num_heads: int, d_kv: int):
    """Takes the sizes.

    Args:
      num_heads: query heads.
      d_kv: width of one head; even, because rotary embedding turns pairs.

    Raises:
      UserError: a size is no positive whole number, or `d_kv` is odd.
    """
    check_count("MultiQueryAttention.num_heads", num_heads)
    check_count("MultiQueryAttention.d_kv", d_kv)
    if d_kv % 2:
      raise UserError(
        f"MultiQueryAttention.d_kv = {d_kv}: rotary embedding turns pairs of "
        f"numbers, so d_kv is even; use {d_kv + 1}."
      )
    super().__init__(num_heads=num_heads, key_value_size=d_kv)

  def make_params(self, context: transformer.Context) -> "_RotaryParams":
    """Returns the kernels q, k, v and o."""
    check_one_model(context)
    return _RotaryParams(context, self.num_heads, self.kv_dim)


class _RotaryParams(attention.AttentionParams):
  """Kernels of a layer; its queries and keys are rotated."""

  def __init__(
    self,
    context: transformer.Context,
    num_heads: int,
    d_kv: mtf.Dimension,
  ):
    d_model = context.model.model_dim
    super().__init__(
      context.mesh,
      query_input_dim=d_model,
      memory_input_dim=d_model,
      output_dim=d_model,
      key_dim=d_kv,
      value_dim=d_kv,
      query_heads_dims=[mtf.Dimension("heads", num_heads)],
      memory_heads_dims=None,
      variable_dtype=context.variable_dtype,
      combine_dims=False,
      # q is divided by sqrt(d_kv): its kernel has the fan-in of all others.
      fold_scaling_into_initializer=False,
    )
    self._context = context

  def compute_q(self, query_antecedent: mtf.Tensor) -> mtf.Tensor:
    """Returns queries [..., heads, d_kv], rotated, divided by sqrt(d_kv)."""
    return self._rotated(super().compute_q(query_antecedent))

  def compute_k(self, memory_antecedent: mtf.Tensor) -> mtf.Tensor:
    """Returns keys [..., d_kv], rotated."""
    return self._rotated(super().compute_k(memory_antecedent))

  def _rotated(self, x: mtf.Tensor) -> mtf.Tensor:
    length = self._context.length_dim
    if self._context.mode == "incremental":
      position = self._context.position
    else:
      # Positions count from the start of the row, not of the sequence in it:
      # q k depends on their difference alone, which is the same either way.
      names = ("length", "memory_length")
      (dim,) = [x for x in x.shape.dims if x.name in names]
      position = mtf.range(x.mesh, dim, tf.int32)
    return rotated(x, *rotary_angles(length, self.key_dim, position))
