# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights of the model, and products with them."""

import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.adapter import PROMPT, A, B
from palm_mtf.architecture.block import (
  LOAD,
  NORMS,
  QK_NORMS,
  Attention,
  Branch,
  Projection,
  Read,
)
from palm_mtf.architecture.parameters import (
  ParameterName,
  dimension_sizes,
  logits_table,
  parameter_shapes,
  parameters_of,
  parse_name,
  read_dtype,
  stored_dtype,
)
from palm_mtf.config import LossConfig, ModelConfig
from palm_mtf.model.dims import Dims
from palm_mtf.model.experts import run_experts
from palm_mtf.model.layers import add_bias, embed
from palm_mtf.model.low_rank import column_factors
from palm_mtf.model.positions import (
  add_positions,
  alibi_slopes,
  distance_vectors,
)
from palm_mtf.model.product import product
from palm_mtf.model.projection import ReadWeights, project
from palm_mtf.model.router import route
from palm_mtf.model.sharding import gather_weight
from palm_mtf.model.virtual import put_virtual
from palm_mtf.ops.variables import Fill, Normal, SlicedVariable
from palm_mtf.steps.plan import stage_layers


def logits_dtype(config: ModelConfig) -> tf.DType:
  """Returns the dtype of logits, by LOGITS_DTYPE."""
  is_float32 = config.logits_dtype == "float32"
  return tf.as_dtype("float32" if is_float32 else config.activation_dtype)


def palm_variables(
  stages: Sequence[mtf.Mesh],
  config: ModelConfig,
  dims: Dims,
  seed: int | None = None,
  layers: Sequence[Iterable[int]] | None = None,
  frozen: Sequence[str] = (),
  loss: LossConfig | None = None,
) -> dict[str, mtf.Tensor]:
  """Makes a variable, split by the layout, for every parameter.

  Args:
    stages: the mesh of each pipeline stage of a pod, or the pod's only mesh.
    seed: seed of initial weights; None for zeros, which a checkpoint replaces.
    layers: numbers of the layers of each stage, without those that need no
      variables; None for all layers, an equal number per stage.
    frozen: FROZEN; the variables of parameters that it matches are not
      trainable.
    loss: the loss of training, which has the rate of states; None if no step
      updates the variables.

  Returns:
    {name in checkpoints: value of the variable}: kernels and the embedding in
    the activation dtype, scales and biases in float32.
  """
  sizes = parameter_shapes(config)  # without padding of the vocabulary
  meshes: dict[int | None, mtf.Mesh] = {None: stages[0]}
  layers = layers or stage_layers(config.num_layers, len(stages))
  for mesh, own in zip(stages, layers, strict=True):
    meshes |= dict.fromkeys(own, mesh)
  variables = {}
  for each in parameters_of(config, tuple(frozen)):
    name, dim_names = each.name, each.dims
    parameter = parse_name(name)
    if parameter.layer not in meshes:
      continue
    shape = [getattr(dims, x) for x in dims.layout.stored(dim_names)]
    stored = stored_dtype(name, config)
    variable = SlicedVariable(
      meshes[parameter.layer],
      name,
      mtf.Shape(shape),
      initializer=initializer(parameter, config, dim_names, seed),
      stored_dtype=tf.as_dtype(stored if loss else "float32"),
      activation_dtype=tf.as_dtype(read_dtype(name, config)),
      trainable=each.is_trained,
      sizes=sizes[name],
    )
    variable.saved_dtype = tf.float32
    if loss:
      variable.state_rate = loss.balance_bias_rate
    variables[name] = variable.value
  return variables


def initializer(
  parameter: ParameterName,
  config: ModelConfig,
  dims: tuple[str, ...],
  seed: int | None,
) -> Normal | Fill:
  """Returns a parameter's initializer (for PaLM's block: PaLM, section 5)."""
  if seed is None:
    return Fill(0.0)
  if parameter.is_scale:
    # At first every norm multiplies by 1 = scale + offset.
    of_heads = (
      QK_NORMS[config.qk_norm] if parameter.kind == "attention" else None
    )
    return Fill(1.0 - (of_heads or NORMS[config.norm]).scale_offset)
  if parameter.part == LOAD:
    return Fill(1.0 / (config.num_experts or 1))
  if parameter.is_vector:
    return Fill(0.0)
  # Logits have variance 1 at first.
  of_logits = config.d_model**-0.5 / config.logits_factor
  if parameter.part == logits_table(config):
    return Normal(of_logits, seed)
  if parameter.part == "position_embedding":
    # Vectors of positions are as large as those of tokens, to which they are
    # added; larger ones would hide the tokens.
    of_tokens = of_logits if logits_table(config) == "embedding" else 1.0
    return Normal(of_tokens * config.embedding_scale, seed)
  if not parameter.is_kernel:  # embedding of tokens
    return Normal(1.0, seed)
  if parameter.is_adapter:  # the product of the factors is 0 at first
    inputs = [dimension_sizes(config)[x] for x in dims[:-1]]
    is_first = dims[-1] == "rank"
    return (
      Normal((3 * math.prod(inputs)) ** -0.5, seed) if is_first else Fill(0)
    )
  fan_in = config.d_model
  if dims[-1] == "d_model":  # o [heads, d_kv, d_model] and wo [d_ff, d_model]
    hidden = "d_ff" if parameter.last == "o" else dims[-2]
    sizes = dimension_sizes(config)
    inputs = {"o": config.num_heads * config.d_kv, "wo": sizes[hidden]}
    is_joined = config.output_fan_in == "joined"
    fan_in = sum(inputs.values()) if is_joined else inputs[parameter.last]
  return Normal(fan_in**-0.5, seed)


class TrainedWeights:
  """Weights in float32 variables, cast to the activation dtype when read.

  JoinedWeights (generation/decode/forward.py) has the same methods, so that
  decoding can use the forward pass of palm.py with other weights.

  Args:
    mesh: mesh of the products with these weights.
    config, dims, seed: see `palm_variables`.
    gradient_dtype: dtype in which devices add up gradients of kernels and of
      the embedding; None is the activation dtype.
    variables: `palm_variables` of all stages; None makes them, on `mesh`.
    loss: the loss of training, with the terms of routers; None without a loss.
  """

  def __init__(
    self,
    mesh: mtf.Mesh,
    config: ModelConfig,
    dims: Dims,
    seed: int | None = None,
    gradient_dtype: tf.DType | None = None,
    variables: Mapping[str, mtf.Tensor] | None = None,
    loss: LossConfig | None = None,
  ):
    self.mesh = mesh
    self._loss = loss or LossConfig(z_loss=0.0, balance_loss=0.0)
    self._config, self._dims = config, dims
    self._variables = variables or palm_variables([mesh], config, dims, seed)
    self._logits_dtype = logits_dtype(config)
    self._gradient_dtype = gradient_dtype

  def embed(
    self, tokens: mtf.Tensor, segments: mtf.Tensor | None
  ) -> mtf.Tensor:
    """Returns embeddings with learned positions, if the model has any.

    `tokens` are [batch, length], int32; for segments see `add_positions`. The
    result is [batch, length, d_model], activation dtype.
    """
    table = self._kernel("embedding", tokens)
    scale = self._config.embedding_scale
    x = embed(table, tokens, self._gradient_dtype, scale)
    if self._config.adapter == "prompt":
      x = put_virtual(x, self._kernel(PROMPT, x), segments)
    if "position_embedding" not in self._variables:
      return x
    return add_positions(x, self._kernel("position_embedding", x), segments)

  def virtual(self, name: str, dims: Sequence[str]) -> mtf.Tensor:
    """Returns keys or values of virtual positions, with the dimensions `dims`.

    They are in the activation dtype.
    """
    del dims  # the variable has them
    return self._variables[name]

  def norm_vectors(self, name: str, after: mtf.Tensor) -> list[mtf.Tensor]:
    """Returns a norm's scale, and its bias if any, [d_model] float32 each."""
    names = [f"{name}/scale", f"{name}/bias"]
    found = [self._kernel(x, after) for x in names if x in self._variables]
    if found:
      return found
    # FINAL_NORM_SCALE = "none" multiplies by 1.
    scale = 1.0 - NORMS[self._config.norm].scale_offset
    shape = mtf.Shape([self._dims.d_model])
    return [mtf.constant(self.mesh, scale, shape, tf.float32)]

  def score_extras(
    self, layer: str, mixer: Attention, length: mtf.Dimension
  ) -> list[mtf.Tensor]:
    """Returns ALiBi's slopes, T5's table, Transformer-XL's tensors, or []."""
    if mixer.score_positions == "alibi":
      heads = self._dims.heads
      slopes = tf.constant(alibi_slopes(heads.size))
      return [mtf.import_tf_tensor(self.mesh, slopes, mtf.Shape([heads]))]
    found = [self._variables[f"{layer}/{name}"] for name, _ in mixer.extras]
    if mixer.score_positions != "transformer_xl":
      return found
    *biases, kernel = found
    kernel = gather_weight(kernel, kernel, self._dims)
    return [*biases, distance_vectors(kernel, length.size)]

  def project_in(
    self, x: mtf.Tensor, layer: str, read: Read, angles: Sequence[mtf.Tensor]
  ) -> list[mtf.Tensor]:
    """Multiplies x by all kernels of `read`, in one product.

    Args:
      x: [batch, length, d_model], activation dtype.
      layer: prefix of the kernels' names, from `layer_name`.
      read: the branches that read x.
      angles: sin and cos, [length, size / 2] float32 each; () if not rotary.

    Returns:
      For attention: q, [batch, length, heads, d_kv]; and k and v, [batch,
      memory_length, d_kv] (multi-query) or [batch, memory_length, key_heads,
      d_kv]. For an MLP: the hidden layer, [batch, length, d_ff].
    """
    adapted = [x for x in read.projections if x.low_rank]
    kernels = {
      name: self._kernel(f"{layer}/{name}", x)
      for each in read.projections
      for name in (each.part, *each.factors)
    }
    weights = ReadWeights(
      [
        self._vector(layer, each, name, kernels)
        for each in read.projections
        for name in each.vectors
      ],
      [kernels[part] for part in read.parts],
      [kernels[f"{each.part}{A}"] for each in adapted],
      [kernels[f"{each.part}{B}"] for each in adapted],
    )
    return project(
      x,
      read,
      weights,
      angles,
      is_trained=[
        getattr(self._variables[f"{layer}/{part}"].operation, "trainable", True)
        for part in read.parts
      ],
      epsilon=self._config.norm_epsilon,
      gradient_dtype=self._gradient_dtype,
    )

  def project_out(
    self,
    layer: str,
    branches: Mapping[Projection, mtf.Tensor],
    others: Sequence[mtf.Tensor] = (),
  ) -> mtf.Tensor:
    """Multiplies each branch by its kernel; adds up the products and `others`.

    Branches are [batch, length, inputs...]; `others` and the result are [batch,
    length, d_model], activation dtype. `layer` is the prefix of the kernels'
    names.
    """
    # If `heads` or `d_ff` is split, a product is an mtf.LazyAllreduceSum. If
    # the same mesh axis splits both, all products share one all-reduce.
    products = []
    for each, x in branches.items():
      kernels = {
        name: self._kernel(f"{layer}/{name}", x)
        for name in (each.part, *each.factors)
      }
      kernel, *tensors = kernels.values()
      if each.magnitude in each.vectors:
        tensors.append(self._vector(layer, each, each.magnitude, kernels))
      adapter = (each.low_rank, tensors) if each.low_rank else None
      dtype = self._gradient_dtype
      products.append(product(x, kernel, adapter, gradient_dtype=dtype))
    return functools.reduce(operator.add, [*products, *others])

  def run_experts(
    self, x: mtf.Tensor, layer: str, branch: Branch
  ) -> mtf.Tensor:
    """Returns the sum of the results of each token's experts.

    x and the result are [batch, length, d_model], activation dtype. `layer` is
    the prefix of the parameters' names.
    """
    mixer = branch.experts
    gates, choice = self.route(x, layer, branch)
    kernels = [
      self._kernel(f"{layer}/{each.part}", x)
      for each in (*branch.inputs[1:], branch.output)
    ]
    capacity = None
    if self._dims.layout.moves_tokens:
      capacity = mixer.capacity(self._dims.length.size)
    given = x, gates, choice, kernels, mixer.mlp, self._gradient_dtype
    return run_experts(*given, capacity)

  def route(
    self, x: mtf.Tensor, layer: str, branch: Branch
  ) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Returns gates and numbers of each token's experts; see `router.route`."""
    mixer = branch.experts
    return route(
      x,
      self._kernel(f"{layer}/{branch.inputs[0].part}", x),
      [self._variables[f"{layer}/{name}"] for name in mixer.states],
      mixer,
      self._loss,
    )

  def output_biases(
    self, layer: str, outputs: Iterable[Projection], after: mtf.Tensor
  ) -> list[mtf.Tensor]:
    """Returns the biases of `outputs`, if any, [d_model] float32 each."""
    return [
      self._kernel(f"{layer}/{each.bias}", after)
      for each in outputs
      if each.has_bias
    ]

  def unembed(self, x: mtf.Tensor) -> mtf.Tensor:
    """Returns logits, [batch, length, vocab], in LOGITS_DTYPE.

    x is the last norm's output, which includes the factor of the logits.
    """
    # Keep the gathered table: the backward pass begins with this product.
    logits = product(
      x,
      self._kernel(logits_table(self._config), x),
      transpose=True,
      dtype=self._logits_dtype,
      keeps_kernel=True,
      gradient_dtype=self._gradient_dtype,
    )
    bias = self._variables.get("logits/bias")
    return logits if bias is None else add_bias(logits, bias)

  def _vector(
    self,
    layer: str,
    of: Projection,
    name: str,
    kernels: Mapping[str, mtf.Tensor],
  ) -> mtf.Tensor:
    """Returns a vector of a product; of its magnitude, the columns' factors."""
    x = self._variables[f"{layer}/{name}"]
    if name != of.magnitude:
      return x
    kernel, *factors = (kernels[x] for x in (of.part, *of.factors))
    x = gather_weight(x, kernel, self._dims)
    return column_factors(x, kernel, *factors, of.low_rank)

  def _kernel(self, name: str, after: mtf.Tensor) -> mtf.Tensor:
    return gather_weight(self._variables[name], after, self._dims)
