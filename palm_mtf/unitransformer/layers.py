# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""PaLM's layers as layers of Mesh TensorFlow's Unitransformer.

Mesh TensorFlow provides masks, packed sequences, layouts of variables and the
decoding cache; model/layers.py provides the arithmetic.
"""

from collections.abc import Callable, Sequence

import gin
from mesh_tensorflow.transformer import (
  attention,
  transformer,
  transformer_layers,
)

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.block import NORMS, Rotary
from palm_mtf.errors import UserError, check_choice, check_count
from palm_mtf.model import layers
from palm_mtf.model.activations import activate
from palm_mtf.model.positions import rotary_tables, rotate_pairs
from palm_mtf.ops.slicewise import WholeSlice
from palm_mtf.ops.xla import fused

NORM_EPSILON = 1e-6

_rotate_pairs = fused(rotate_pairs)


@fused
def _apply_gate(gate: tf.Tensor, linear: tf.Tensor) -> tf.Tensor:
  return activate([gate, linear], "swish")


@fused
def _differentiate_gate(
  gate: tf.Tensor, linear: tf.Tensor, dy: tf.Tensor
) -> tuple[tf.Tensor, ...]:
  y = activate([gate, linear], "swish")
  return tuple(tf.gradients(y, [gate, linear], dy))


def _check_one_model(context: transformer.Context) -> None:
  ensemble = context.model.ensemble_dim
  if ensemble:
    raise UserError(
      f"Unitransformer.ensemble = {ensemble.size}: the layers of "
      "palm_mtf.unitransformer have the weights of one model; leave ensemble "
      "out."
    )


@gin.configurable(module="palm_mtf.unitransformer")
def sublayer_norm(
  x: mtf.Tensor,
  layer_stack: transformer.LayerStack,
  context: transformer.Context,
  norm: str = "layer_norm",
) -> mtf.Tensor:
  """Normalizes x over d_model, without bias; a sublayer of a LayerStack.

  Args:
    x: [..., d_model], activation dtype.
    layer_stack: unused.
    context: gives the dtypes of variables.
    norm: "layer_norm" or "rms_norm".

  Raises:
    UserError: if `norm` has another value.
  """
  del layer_stack
  check_choice("sublayer_norm.norm", norm, ["layer_norm", "rms_norm"])
  _check_one_model(context)
  dtypes = context.variable_dtype
  with tf.variable_scope("norm"):
    scale = mtf.get_variable(
      context.mesh,
      "scale",
      mtf.Shape([context.model.model_dim]),
      initializer=tf.ones_initializer(),
      # The scale is read as float32, because norms are computed in float32.
      dtype=mtf.VariableDType(
        dtypes.master_dtype, dtypes.slice_dtype, tf.float32
      ),
    )
  return layers.norm(x, [scale], NORMS[norm], NORM_EPSILON)


@gin.configurable(module="palm_mtf.unitransformer")
class MultiQueryAttention(transformer_layers.SelfAttention):
  """Multi-query self-attention with rotary embedding (PaLM, section 2)."""

  def __init__(self, num_heads: int, d_kv: int):
    """Checks the sizes.

    Args:
      num_heads: number of query heads.
      d_kv: width of a head; even, because rotary embedding rotates pairs.

    Raises:
      UserError: if a size is not a positive whole number, or `d_kv` is odd.
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
    _check_one_model(context)
    return _RotaryParams(context, self.num_heads, self.kv_dim)


class _RotaryParams(attention.AttentionParams):
  """The kernels of an attention layer; rotates queries and keys."""

  def __init__(
    self, context: transformer.Context, num_heads: int, d_kv: mtf.Dimension
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
      # The forward pass divides q by sqrt(d_kv) instead, so that the kernel of
      # q has the same initializer as other kernels.
      fold_scaling_into_initializer=False,
    )
    self._context = context

  def compute_q(self, query_antecedent: mtf.Tensor) -> mtf.Tensor:
    return self._rotate(super().compute_q(query_antecedent))

  def compute_k(self, memory_antecedent: mtf.Tensor) -> mtf.Tensor:
    return self._rotate(super().compute_k(memory_antecedent))

  def _rotate(self, x: mtf.Tensor) -> mtf.Tensor:
    length = self._context.length_dim
    if self._context.mode == "incremental":
      position = self._context.position
    else:
      # In a packed row, positions count from the start of the row, because the
      # product of q and k depends only on differences of positions.
      names = ("length", "memory_length")
      (dim,) = [x for x in x.shape.dims if x.name in names]
      position = mtf.range(x.mesh, dim, tf.int32)
    return rotate(x, *compute_rotary_angles(length, self.key_dim, position))


def compute_rotary_angles(
  length: mtf.Dimension, d_kv: mtf.Dimension, position: mtf.Tensor
) -> list[mtf.Tensor]:
  """Returns sin and cos of the angles at given positions.

  Args:
    length: dimension of a whole sequence; its size is the number of positions.
    d_kv: width of a head.
    position: int32, any shape.

  Returns:
    Two tensors [..., d_kv / 2], float32, with the dimensions of `position`.
  """

  # mtf.gather would be a matrix product, in which TPUs round to bfloat16.
  def look_up(table: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
    # A sequence that has ended stays in the decoding batch, so its position may
    # exceed the table.
    return tf.gather(table, tf.minimum(position, length.size - 1))

  angles = []
  rows = mtf.Dimension("position", length.size)  # no layout splits this name
  for table in rotary_tables(position.mesh, rows, _whole_head(d_kv.size)):
    pairs = table.shape.dims[-1]
    at = WholeSlice(
      look_up,
      [table, position],
      [(position.shape + pairs, table.dtype)],
      splittable=[dim.name for dim in position.shape.dims],
      name="rotary_angles",
    )
    angles += at.outputs
  return angles


def _whole_head(d_kv: int) -> Rotary:
  return Rotary(d_kv, "halves", 10_000.0)


def rotate(x: mtf.Tensor, sin: mtf.Tensor, cos: mtf.Tensor) -> mtf.Tensor:
  """Applies rotary embedding: rotates pairs (x[i], x[i + d_kv / 2]).

  Args:
    x: [..., d_kv], queries or keys.
    sin: [..., d_kv / 2], float32, whose leading dimensions are a subsequence of
      x's.
    cos: same shape and dtype as `sin`.

  Returns:
    A tensor with the shape and dtype of x.
  """
  leading = x.shape.dims[:-1]
  missing = [i for i, dim in enumerate(leading) if dim not in sin.shape.dims]

  def turn(x: tf.Tensor, sin: tf.Tensor, cos: tf.Tensor) -> tf.Tensor:
    for axis in missing:
      sin, cos = tf.expand_dims(sin, axis), tf.expand_dims(cos, axis)
    return _rotate_pairs(x, sin, cos, _whole_head(x.shape[-1]))

  def make_operation(
    fn: Callable[..., tf.Tensor],
    inputs: Sequence[mtf.Tensor],
    gradient: Callable[..., list[mtf.Tensor | None]] | None = None,
  ) -> mtf.Tensor:
    return WholeSlice(
      fn,
      inputs,
      [(x.shape, x.dtype)],
      splittable=[dim.name for dim in leading],
      gradient=gradient,
      name="rotary",
    ).outputs[0]

  def gradient(op: WholeSlice, dy: mtf.Tensor) -> list[mtf.Tensor | None]:
    # `op` may be a recomputed copy, whose angles are not `sin` and `cos`.
    _, *angles = op.inputs
    back = make_operation(  # rotates by the opposite angles
      lambda dy, sin, cos: turn(dy, -sin, cos), [dy, *angles]
    )
    return [back, None, None]

  return make_operation(turn, [x, sin, cos], gradient)


@gin.configurable(module="palm_mtf.unitransformer")
class SwiGlu(transformer.TransformerLayer):
  """The MLP (swish(x wi_gate) * (x wi)) wo, no biases (PaLM, section 2)."""

  def __init__(self, d_ff: int):
    """Checks the width.

    Args:
      d_ff: hidden width, 4 * d_model in PaLM.

    Raises:
      UserError: if `d_ff` is not a positive whole number.
    """
    check_count("SwiGlu.d_ff", d_ff)
    self._d_ff = mtf.Dimension("d_ff", d_ff)

  def call(
    self,
    context: transformer.Context,
    x: mtf.Tensor,
    losses: list[mtf.Tensor] | None = None,
  ) -> mtf.Tensor:
    """Returns MLP(x), with the shape and dtype of x, [..., d_model].

    `context` gives the dtypes of variables; `losses` is unused.
    """
    del losses
    _check_one_model(context)
    gate = _multiply(context, x, "wi_gate", self._d_ff)
    linear = _multiply(context, x, "wi", self._d_ff)
    hidden = _activate(gate, linear)
    return _multiply(context, hidden, "wo", context.model.model_dim)


def _multiply(
  context: transformer.Context, x: mtf.Tensor, name: str, output: mtf.Dimension
) -> mtf.Tensor:
  inputs = x.shape.dims[-1]
  kernel = mtf.get_variable(
    context.mesh,
    name,
    mtf.Shape([inputs, output]),
    initializer=tf.random_normal_initializer(stddev=inputs.size**-0.5),
    dtype=context.variable_dtype,
  )
  return mtf.einsum([x, kernel], reduced_dims=[inputs])


def _activate(gate: mtf.Tensor, linear: mtf.Tensor) -> mtf.Tensor:
  # Returns swish(gate) * linear.
  output = (linear.shape, linear.dtype)
  splittable = linear.shape.dimension_names  # all: the gate is element-wise

  def gradient(op: WholeSlice, dy: mtf.Tensor) -> list[mtf.Tensor]:
    return list(
      WholeSlice(
        _differentiate_gate,
        [*op.inputs, dy],
        [output, output],
        splittable=splittable,
        name="swiglu_gradient",
      ).outputs
    )

  return WholeSlice(
    _apply_gate,
    [gate, linear],
    [output],
    splittable=splittable,
    gradient=gradient,
    name="swiglu",
  ).outputs[0]


@gin.configurable(module="palm_mtf.unitransformer")
class ParallelBlock(transformer.TransformerLayer):
  """Attention(x) + MLP(x); the LayerStack normalizes x (PaLM, section 2)."""

  # Mesh TensorFlow's ParallelLayer is not used, because it divides the sum by
  # sqrt(2), unlike PaLM.

  def __init__(
    self,
    layer_classes: Sequence[type[transformer.TransformerLayer]] = (
      MultiQueryAttention,
      SwiGlu,
    ),
  ):
    """Makes the layers that are summed; gin sets the layers' arguments."""
    self._layers = [layer() for layer in layer_classes]

  def call(
    self,
    context: transformer.Context,
    x: mtf.Tensor,
    losses: list[mtf.Tensor] | None = None,
  ) -> mtf.Tensor:
    """Returns the sum of the layers, with the shape and dtype of x.

    Args:
      context: positions, masks and the decoding cache.
      x: [..., d_model], normalized.
      losses: list to which layers append additional losses.
    """
    branches = []
    for layer in self._layers:
      with tf.variable_scope(type(layer).__name__):
        branches.append(layer.call(context, x, losses=losses))
    return mtf.add_n(branches)
