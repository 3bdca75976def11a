# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights of the model, and products with them."""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Protocol

from palm_mtf._tf import mtf, tf
from palm_mtf.accounting.architecture import (
  ParameterName,
  parameter_dims,
  parameter_shapes,
  parse_name,
)
from palm_mtf.accounting.pipeline import stage_of
from palm_mtf.config import PalmConfig
from palm_mtf.model.dims import Dims
from palm_mtf.model.layers import embed
from palm_mtf.model.projection import project
from palm_mtf.model.sharding import gather_weight
from palm_mtf.ops.matmul import matmul
from palm_mtf.ops.recompute import recompute
from palm_mtf.ops.slicewise import WholeSlice
from palm_mtf.ops.variables import Fill, Normal, SlicedVariable

# Names, within a layer, of kernels that read the same input.
QKV = ("attention/q", "attention/k", "attention/v")
GATES = ("mlp/wi_gate", "mlp/wi")


class Weights(Protocol):
  """Parameters of one model on one mesh, by their names in checkpoints.

  Two classes implement this protocol: TrainedWeights for training, and
  JoinedWeights for decoding (generation/decode/forward.py).
  """

  mesh: mtf.Mesh

  def embed(self, tokens: mtf.Tensor) -> mtf.Tensor:
    """Returns each token's row of the embedding, [batch, length, d_model]."""

  def scale(self, name: str, after: mtf.Tensor) -> mtf.Tensor:
    """Returns a norm's scale, [d_model] float32; a gather waits for `after`."""

  def project_in(
    self,
    x: mtf.Tensor,
    layer: str,
    parts: Sequence[str],
    angles: Sequence[mtf.Tensor] = (),
  ) -> list[mtf.Tensor]:
    """Multiplies x by several kernels of a layer, in one product.

    Args:
      x: [batch, length, d_model], activation dtype.
      layer: prefix of the kernels' names, from `layer_name`.
      parts: QKV, GATES, or both.
      angles: sin and cos of rotary embedding, [length, d_kv / 2] float32 each;
        () without QKV.

    Returns:
      For QKV: rotated q, [batch, length, heads, d_kv]; rotated k; and v. The
      shape of k and v is [batch, memory_length, d_kv] (multi-query) or [batch,
      memory_length, heads, d_kv] (multi-head). For GATES: one tensor,
      swish(x wi_gate) * (x wi), [batch, length, d_ff].
    """

  def project_out(self, branches: Mapping[str, mtf.Tensor]) -> mtf.Tensor:
    """Multiplies each branch by its kernel, and adds up the products.

    Args:
      branches: {name of a kernel: branch, [batch, length, inputs...]}.

    Returns:
      [batch, length, d_model], activation dtype.
    """

  def unembed(self, x: mtf.Tensor) -> mtf.Tensor:
    """Returns x embedding^T, [batch, length, vocab], in `logits_dtype`."""


def logits_dtype(config: PalmConfig) -> tf.DType:
  """Returns the dtype of logits, by LOGITS_DTYPE."""
  is_float32 = config.logits_dtype == "float32"
  return tf.as_dtype("float32" if is_float32 else config.activation_dtype)


def palm_variables(
  stages: Sequence[mtf.Mesh],
  config: PalmConfig,
  dims: Dims,
  seed: int | None = None,
) -> dict[str, mtf.Tensor]:
  """Makes a variable for every parameter.

  Args:
    stages: mesh of each stage of one pod; one mesh for all layers if there are
      no stages.
    seed: seed of the initial weights; None for zeros, if a checkpoint replaces
      them.

  Returns:
    {name in checkpoints: value of the variable}: kernels and the embedding in
    the activation dtype, scales in float32.
  """
  sizes = parameter_shapes(config)  # without padding of the vocabulary
  variables = {}
  for name, dim_names in parameter_dims(config).items():
    shape = [getattr(dims, dim) for dim in dim_names]
    stored = [dims.d_model_stored if x == dims.d_model else x for x in shape]
    parameter = parse_name(name)
    variables[name] = SlicedVariable(
      stages[stage_of(parameter.layer, config, len(stages))],
      name,
      mtf.Shape(stored),
      initializer=_initializer(parameter, config, dim_names, seed),
      activation_dtype=tf.as_dtype(
        "float32" if parameter.is_scale else config.activation_dtype
      ),
      sizes=sizes[name],
    ).value
  return variables


def _initializer(
  parameter: ParameterName,
  config: PalmConfig,
  dims: tuple[str, ...],
  seed: int | None,
) -> Normal | Fill:
  # These are the initializers of PaLM, section 5.
  if seed is None:
    return Fill(0.0)
  if parameter.is_scale:
    return Fill(1.0)
  if not parameter.is_kernel:  # the embedding
    return Normal(1.0, seed)
  fan_in = config.d_model
  if dims[0] != "d_model":  # o [heads, d_kv, d_model] and wo [d_ff, d_model]
    inputs = {"o": config.num_heads * config.d_kv, "wo": config.d_ff}
    is_joined = config.output_fan_in == "joined"
    fan_in = sum(inputs.values()) if is_joined else inputs[parameter.last]
  return Normal(fan_in**-0.5, seed)


def positions_of(
  parts: Sequence[str], length: mtf.Dimension
) -> list[mtf.Dimension]:
  """Returns the dimension of positions in each product of `project_in`."""
  # See `Dims.memory_length`.
  memory_length = mtf.Dimension("memory_length", length.size)
  return [memory_length if part in QKV[1:] else length for part in parts]


class TrainedWeights:
  """Weights in float32 variables, cast to the activation dtype when read.

  The arguments are the mesh, those of `palm_variables`, the dtype in which
  devices add up gradients of kernels and of the embedding (None: activation
  dtype), and the variables of all stages; None makes them on the mesh.
  """

  def __init__(
    self,
    mesh: mtf.Mesh,
    config: PalmConfig,
    dims: Dims,
    seed: int | None = None,
    gradient_dtype: tf.DType | None = None,
    variables: Mapping[str, mtf.Tensor] | None = None,
  ):
    self.mesh = mesh
    self._dims = dims
    self._variables = variables or palm_variables([mesh], config, dims, seed)
    self._logits_dtype = logits_dtype(config)
    self._gradient_dtype = gradient_dtype

  def embed(self, tokens: mtf.Tensor) -> mtf.Tensor:
    """Returns each token's row of the embedding; see `Weights`."""
    table = self._kernel("embedding", tokens)
    return embed(table, tokens, self._gradient_dtype)

  def scale(self, name: str, after: mtf.Tensor) -> mtf.Tensor:
    """Returns the scale of a norm; see `Weights`."""
    scale = self._variables.get(f"{name}/scale")
    if scale is None:  # FINAL_NORM_SCALE = "none"
      return mtf.ones(self.mesh, mtf.Shape([self._dims.d_model]))
    return gather_weight(scale, after, self._dims)

  def project_in(
    self,
    x: mtf.Tensor,
    layer: str,
    parts: Sequence[str],
    angles: Sequence[mtf.Tensor] = (),
  ) -> list[mtf.Tensor]:
    """Multiplies by several kernels in one product; see `Weights`."""
    return project(
      x,
      [self._kernel(f"{layer}/{part}", x) for part in parts],
      positions_of(parts, x.shape.dims[1]),
      angles,
      is_gated=parts[-1] == GATES[-1],
      gradient_dtype=self._gradient_dtype,
    )

  def project_out(self, branches: Mapping[str, mtf.Tensor]) -> mtf.Tensor:
    """Adds up the branches' products; see `Weights`."""
    # If `heads` or `d_ff` is split, a product is an mtf.LazyAllreduceSum, which
    # is all-reduced only when it is read. Therefore, if the same mesh axis
    # splits both dimensions, the branches share one all-reduce.
    products = [
      product(x, self._kernel(name, x), gradient_dtype=self._gradient_dtype)
      for name, x in branches.items()
    ]
    return functools.reduce(operator.add, products)

  def unembed(self, x: mtf.Tensor) -> mtf.Tensor:
    """Multiplies by the tied embedding; see `Weights`."""
    # The backward pass begins with this product, so the gathered table is kept
    # and not gathered again.
    return product(
      x,
      self._kernel("embedding", x),
      transpose=True,
      dtype=self._logits_dtype,
      keeps_kernel=True,
      gradient_dtype=self._gradient_dtype,
    )

  def _kernel(self, name: str, after: mtf.Tensor) -> mtf.Tensor:
    return gather_weight(self._variables[name], after, self._dims)


def product(
  x: mtf.Tensor,
  kernel: mtf.Tensor,
  *,
  transpose: bool = False,
  dtype: tf.DType | None = None,
  keeps_kernel: bool = False,
  gradient_dtype: tf.DType | None = None,
) -> mtf.Tensor:
  """Multiplies x by a kernel.

  If a layout splits the inputs, the product is an mtf.LazyAllreduceSum.

  Args:
    x: [batch, length, inputs...], activation dtype.
    kernel: [inputs..., output], or [output, inputs] if `transpose`; dtype of x.
    transpose: whether to multiply by the transposed kernel.
    dtype: dtype of the product: float32 or the dtype of x; None is the latter.
    keeps_kernel: whether the kernel is kept for the backward pass; otherwise
      the kernel is recomputed (ops/recompute.py).
    gradient_dtype: dtype in which devices add up the kernel's gradient; None is
      the dtype of x.

  Returns:
    [batch, length, output].
  """
  output = kernel.shape.dims[0 if transpose else -1]

  def matrices(x, kernel):
    x = tf.reshape(x, [x.shape[0] * x.shape[1], -1])
    return x, kernel if transpose else tf.reshape(kernel, [x.shape[1], -1])

  def forward(x, kernel):
    rows, matrix = matrices(x, kernel)
    y = matmul(rows, matrix, transpose_b=transpose, dtype=dtype)
    return tf.reshape(y, [*x.shape[:2], y.shape[1]])

  def backward(x, kernel, dy):
    rows, matrix = matrices(x, kernel)
    dy = tf.cast(tf.reshape(dy, [rows.shape[0], -1]), x.dtype)
    dx = matmul(dy, matrix, transpose_b=not transpose)
    first, second = (dy, rows) if transpose else (rows, dy)
    dkernel = matmul(first, second, transpose_a=True)
    dkernel = tf.reshape(dkernel, kernel.shape)
    return tf.reshape(dx, x.shape), tf.cast(dkernel, gradient_dtype or x.dtype)

  def gradient(op, dy):
    x, kernel = op.inputs
    if not keeps_kernel:
      kernel = recompute(kernel, dy)
    return WholeSlice(
      backward,
      [recompute(x, dy), kernel, dy],
      [(x.shape, x.dtype), (kernel.shape, gradient_dtype or x.dtype)],
      splittable=["batch", "heads", "d_ff", "vocab"],
      name="product_gradient",
    ).outputs

  return WholeSlice(
    forward,
    [x, kernel],
    [(mtf.Shape([*x.shape.dims[:2], output]), dtype or x.dtype)],
    splittable=["batch", "heads", "d_ff", "vocab"],
    gradient=gradient,
    name="product",
  ).outputs[0]
