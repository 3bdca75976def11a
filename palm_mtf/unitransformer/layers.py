# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The block of palm_mtf as layers of Mesh TensorFlow's Unitransformer.

Mesh TensorFlow provides variables and their layouts, masks, packed sequences
and the decoding cache. The arithmetic is that of the forward pass (model/) and
of the decoding step (generation/decode/block.py).
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import gin
from mesh_tensorflow.transformer import transformer

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture import block, parameters
from palm_mtf.architecture.rotary import Rotary
from palm_mtf.config import MeshLayout, ModelConfig
from palm_mtf.errors import UserError, check_choice
from palm_mtf.generation.decode.block import attend_to_cache, mix_products
from palm_mtf.model import layers, positions
from palm_mtf.model.attention import self_attention
from palm_mtf.model.dims import model_dims
from palm_mtf.model.sharding import Resharded
from palm_mtf.model.weights import TrainedWeights, initializer
from palm_mtf.ops.slicewise import WholeSlice
from palm_mtf.ops.variables import Fill

# {kind of layer: fields of `ModelConfig` that gin may set for the layer}
_SETTINGS = {
  "norm": "norm norm_epsilon",
  "attention": "num_heads d_kv attention num_kv_heads attention_window qk_norm "
  "score_scale norm_epsilon positions rotary_fraction rotary_pairs rotary_base "
  "rotary_scaling rotary_factor rotary_original_length rotary_slow rotary_fast "
  "rotary_truncate rotary_attention_factor biases",
  "mlp": "d_ff mlp biases",
}
_SIZES = "num_layers d_model num_heads d_kv d_ff vocab_size sequence_length"
# Every layer has the names of layer 0, in a Mesh TensorFlow scope per layer.
_LAYER = parameters.layer_name(0)
_MODULE = "palm_mtf.unitransformer"


def _check(name: str, kind: str, settings: Mapping[str, object]) -> ModelConfig:
  # Returns a ModelConfig with `settings`. Sizes that `kind` does not use are 2,
  # because a ModelConfig needs all sizes. Raises UserError if a setting is
  # unknown, wrong or missing.
  known = _SETTINGS[kind].split()
  for each in settings:
    check_choice(f"setting of {name}", each, known)
  if settings.get("qk_norm") == "rms_norm_all_heads":
    raise UserError(
      f"{name}.qk_norm = 'rms_norm_all_heads': Mesh TensorFlow's layout may "
      "split the heads, all of which the norm needs; use another norm."
    )
  sizes = {each: None if each in known else 2 for each in _SIZES.split()}
  try:
    return ModelConfig(**{**sizes, **settings})  # type: ignore[arg-type]
  except UserError as error:
    # The error names macros, such as D_KV; name the settings, such as d_kv.
    text = re.sub(r"\b[A-Z]+(_[A-Z]+)*\b", lambda x: x[0].lower(), str(error))
    raise UserError(f"{name}.{text}") from None


def _reshape(x: mtf.Tensor, dims: Sequence[mtf.Dimension]) -> mtf.Tensor:
  # Returns x itself if it has the shape, because the backward pass could not
  # recompute the output of mtf.reshape.
  return x if x.shape == mtf.Shape(dims) else mtf.reshape(x, dims)


class _Call:
  """A call of a layer; joins its batch dimensions, such as batch and beams."""

  def __init__(self, context: transformer.Context, config: ModelConfig):
    self.context = context
    # Put "batch" first, so that its layout rule can split the joined dimension.
    self.batch_dims = sorted(
      context.batch_dims, key=lambda x: x.name != "batch"
    )
    self.config = dataclasses.replace(
      config,
      d_model=context.model.model_dim.size,
      sequence_length=context.length_dim.size,
    )
    num_rows = mtf.Shape(context.batch_dims).size
    # No layout rules, because Mesh TensorFlow itself lays out tensors.
    mesh = MeshLayout(mesh_shape="", layout="")
    self.dims = model_dims(self.config, num_rows, mesh)

  def make_variables(self, kind: str) -> dict[str, mtf.Tensor]:
    """Makes this layer's parameters of one kind, such as "attention".

    Returns {name: value}; the names are those of layer 0 in any layer.
    """
    context, stored = self.context, self.context.variable_dtype
    if ensemble := context.model.ensemble_dim:
      raise UserError(
        f"Unitransformer.ensemble = {ensemble.size}: the layers of "
        f"{_MODULE} have the weights of one model; leave ensemble out."
      )
    found = {}
    for name, dims in parameters.parameter_dims(self.config).items():
      parameter = parameters.parse_name(name)
      if parameter.kind != kind or parameter.layer != 0:
        continue
      # Norms and biases are computed in float32.
      dtype = tf.float32 if parameter.is_vector else context.activation_dtype
      first = initializer(parameter, self.config, dims, seed=0)
      x = mtf.get_variable(
        context.mesh,
        parameter.part.split("/", 1)[1],
        mtf.Shape([getattr(self.dims, each) for each in dims]),
        initializer=tf.constant_initializer(first.number)
        if isinstance(first, Fill)
        else tf.random_normal_initializer(stddev=first.stddev),
        dtype=mtf.VariableDType(stored.master_dtype, stored.slice_dtype, dtype),
      )
      if context.train and dtype == stored.slice_dtype:
        # Mesh TensorFlow's optimizers write over a variable in place, perhaps
        # before the backward pass has read it. So the model reads a copy.
        x = mtf.slicewise(
          lambda x: tf.raw_ops.Snapshot(input=x),
          [x],
          splittable_dims=x.shape.dims,
          grad_function=lambda _, dy: [dy],
        )
      found[name] = x
    return found

  def add_branches(
    self,
    x: mtf.Tensor,
    branches: Sequence[block.Branch],
    variables: Mapping[str, mtf.Tensor],
  ) -> mtf.Tensor:
    """Returns the sum of branches, which share one product with x."""
    is_step = self.context.mode == "incremental"
    length = mtf.Dimension("step", 1) if is_step else self.context.length_dim
    here = tuple(
      dataclasses.replace(
        branch,
        inputs=tuple(y._replace(positions=length.name) for y in branch.inputs),
      )
      for branch in branches
    )
    read = block.Read("norm", here)
    rotary = branches[0].inputs[0].rotary
    angles = self.find_angles(rotary, length) if rotary else []
    mesh, dims = self.context.mesh, self.dims
    own = TrainedWeights(mesh, self.config, dims, variables=variables)
    rows = _reshape(self.join_batch(x), [dims.batch, length, dims.d_model])
    parts = own.project_in(rows, _LAYER, read, angles)
    attend = self.attend_to_cache if is_step else self.attend
    results = mix_products(read, parts, functools.partial(attend, own))
    mixed = zip(branches, results, strict=True)
    y = own.project_out(_LAYER, {branch.output: y for branch, y in mixed})
    outputs = [branch.output for branch in branches]
    for bias in own.output_biases(_LAYER, outputs, after=y):
      y = layers.add_bias(y, bias)
    others = [dim for dim in x.shape.dims if dim not in self.batch_dims]
    return mtf.broadcast(_reshape(y, [*self.batch_dims, *others]), x.shape)

  def find_angles(
    self, rotary: Rotary, length: mtf.Dimension
  ) -> list[mtf.Tensor]:
    """Returns the rotary tables, sin and cos, for the positions of q and k."""
    mesh, batch = self.context.mesh, self.dims.batch
    if length == self.context.length_dim:
      return positions.rotary_tables(mesh, length, rotary)
    tables = positions.rotary_tables(mesh, self.dims.positions, rotary)
    return [
      mtf.slicewise(
        # mtf.gather would be a product, in which TPUs round to bfloat16.
        lambda at, table: tf.gather(table, at)[:, tf.newaxis],
        [self.find_position(), x],
        output_shape=[batch, length, x.shape.dims[-1]],
        output_dtype=x.dtype,
        splittable_dims=[batch],
      )
      for x in tables
    ]

  def attend(self, weights: TrainedWeights, *given: Any) -> mtf.Tensor:
    """Attends from all positions; `given` has q, k, v and a block.Attention."""
    *qkv, mixer = given
    extras = weights.score_extras(_LAYER, mixer, self.context.length_dim)
    # Gather all positions on each device, even if the layout splits `length`,
    # because the first position of a block of queries is a constant.
    whole = self.context.length_dim, self.dims.memory_length
    q, k, v, *masks = (
      Resharded(x, whole).outputs[0] for x in (*qkv, *self.find_masks())
    )
    if self.context.mode == "first_part":
      batch, length, *heads, d_kv = k.shape.dims
      cached = [batch, *heads, length, d_kv]
      self.record(mtf.transpose(x, cached) for x in (k, v))
    y = self_attention(q, k, v, *masks, mixer=mixer, extras=extras)
    return Resharded(y, whole[::-1]).outputs[0]

  def find_masks(self) -> list[mtf.Tensor]:
    """Returns [], [segments] or [segments, prefix] for `self_attention`."""
    context = self.context
    segments = [
      self.join_batch(x)
      for x in (context.subsequence_id, context.sequence_id)
      if isinstance(x, mtf.Tensor) and context.length_dim in x.shape.dims
    ][:1]
    if context.model.fully_autoregressive:
      return segments
    # The prefix has all positions of an encoder, or else those of the inputs.
    prefix = mtf.ones(context.mesh, [context.length_dim], tf.int32)
    if context.write_priority is not None:
      prefix = mtf.cast(mtf.equal(context.write_priority, 0), tf.int32)
    prefix = self.join_batch(prefix)
    return [*(segments or [mtf.zeros_like(prefix)]), prefix]

  def attend_to_cache(self, weights: TrainedWeights, *given: Any) -> mtf.Tensor:
    """Attends from one position per row to the cache; see `attend`."""
    *qkv, mixer = given
    extras = weights.score_extras(_LAYER, mixer, self.context.length_dim)
    old = [self.join_batch(x) for x in self.context.get_states(2)]

    def step(
      at: tf.Tensor, q: tf.Tensor, *others: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
      k, v, keys, values, *extras = others
      _, *heads, length, d_kv = keys.shape
      here = tf.equal(tf.range(length), at[:, tf.newaxis])
      here = tf.reshape(here, [-1, *(1 for _ in heads), length, 1])
      keys, values = (
        tf.where_v2(here, tf.reshape(new, [-1, *heads, 1, d_kv]), old)
        for new, old in ((k, keys), (v, values))
      )
      y = attend_to_cache(q, keys, values, at[:, tf.newaxis], mixer, extras)
      return tf.reshape(y, q.shape), keys, values

    y, *new = WholeSlice(
      step,
      [self.find_position(), *qkv, *old, *extras],
      [(x.shape, x.dtype) for x in (qkv[0], *old)],
      splittable=["batch", "heads"],
      name="attention_step",
    ).outputs
    self.record(new)
    return y

  def join_batch(self, x: mtf.Tensor) -> mtf.Tensor:
    """Returns x [batch dimensions..., others...] as [batch, others...]."""
    others = [dim for dim in x.shape.dims if dim not in self.batch_dims]
    # x may lack batch dimensions, or have them in another order.
    x = mtf.broadcast(x, [*self.batch_dims, *others])
    return _reshape(x, [self.dims.batch, *others])

  def record(self, states: Iterable[mtf.Tensor]) -> None:
    """Puts keys and values, [batch, ..., memory_length, d_kv], in the cache."""
    self.context.record_new_states(
      [_reshape(x, [*self.batch_dims, *x.shape.dims[1:]]) for x in states]
    )

  def find_position(self) -> mtf.Tensor:
    """Returns the position of each row's token, [batch] int32."""
    # A finished sequence stays in the batch; its position may pass the last.
    last = self.context.length_dim.size - 1
    return self.join_batch(mtf.minimum(self.context.position, last))


@gin.configurable(module=_MODULE)
def sublayer_norm(
  x: mtf.Tensor,
  layer_stack: transformer.LayerStack,
  context: transformer.Context,
  norm: str = "layer_norm",
  norm_epsilon: float = 1e-6,
) -> mtf.Tensor:
  """Normalizes x over d_model; a sublayer of a LayerStack.

  Args:
    x: [..., d_model], activation dtype.
    layer_stack: unused.
    context: gives the dtypes of variables.
    norm: value of NORM.
    norm_epsilon: value of NORM_EPSILON.

  Raises:
    UserError: if a setting has a wrong value.
  """
  del layer_stack
  settings = {"norm": norm, "norm_epsilon": norm_epsilon}
  config = _check("sublayer_norm", "norm", settings)
  with tf.variable_scope("norm"):
    vectors = list(_Call(context, config).make_variables("norm").values())
  return layers.norm(x, vectors, block.NORMS[norm], norm_epsilon)


class _Branch(transformer.TransformerLayer):
  """Attention or MLP; gin files and variables use the names of subclasses."""

  kind: str  # "attention" or "mlp"

  def __init__(self, **settings: object):
    """Checks the settings, which are fields of `ModelConfig`.

    Raises UserError if a setting is unknown or has a wrong value.
    """
    self.config = _check(type(self).__name__, self.kind, settings)
    (self.branch,) = (
      x
      for x in block.model_of(self.config).layers[0].branches
      if x.output.part.startswith(self.kind)
    )

  def call(
    self,
    context: transformer.Context,
    x: mtf.Tensor,
    losses: list[mtf.Tensor] | None = None,
  ) -> mtf.Tensor:
    """Applies the branch to x; keeps the shape and dtype of x, [..., d_model].

    `context` has positions, masks and the decoding cache; `losses` is unused.
    """
    del losses
    call = _Call(context, self.config)
    return call.add_branches(x, [self.branch], call.make_variables(self.kind))


@gin.configurable(module=_MODULE)
class Attention(_Branch):
  """Self-attention with `num_heads` heads of width `d_kv`.

  Other settings, if they differ from PaLM's, are `attention`, `num_kv_heads`,
  `attention_window`, `qk_norm`, `score_scale`, `norm_epsilon`, `positions`,
  those that begin with `rotary_`, and `biases`. With `positions` = "learned",
  `Unitransformer.positional_embedding` adds the vectors of positions.
  """

  kind = "attention"


@gin.configurable(module=_MODULE)
class MultiQueryAttention(_Branch):
  """PaLM's attention, with `num_heads` heads of width `d_kv`, which is even."""

  kind = "attention"


@gin.configurable(module=_MODULE)
class Mlp(_Branch):
  """An MLP of width `d_ff`; other settings are `mlp` and `biases`."""

  kind = "mlp"


@gin.configurable(module=_MODULE)
class SwiGlu(_Branch):
  """PaLM's MLP (swish(x wi_gate) * (x wi)) wo, of width `d_ff`."""

  kind = "mlp"


@gin.configurable(module=_MODULE)
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
    ours = [x for x in self._layers if isinstance(x, _Branch)]
    self._joined = {x.kind: x for x in reversed(ours)}

  def call(
    self,
    context: transformer.Context,
    x: mtf.Tensor,
    losses: list[mtf.Tensor] | None = None,
  ) -> mtf.Tensor:
    """Returns the sum of the layers, with the shape and dtype of x.

    The first attention and the first MLP of palm_mtf share one product with x.

    Args:
      context: positions, masks and the decoding cache.
      x: [..., d_model], normalized.
      losses: list to which layers append additional losses.
    """
    results = []
    variables: dict[str, mtf.Tensor] = {}
    for layer in self._layers:
      with tf.variable_scope(type(layer).__name__):
        if layer in self._joined.values():
          call = _Call(context, layer.config)
          variables |= call.make_variables(layer.kind)
        else:
          results.append(layer.call(context, x, losses=losses))
    if self._joined:
      joined = [self._joined[kind] for kind in sorted(self._joined)]
      call = _Call(context, joined[0].config)
      branches = [each.branch for each in joined]
      results.append(call.add_branches(x, branches, variables))
    return mtf.add_n(results)
