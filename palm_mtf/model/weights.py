# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights of the model, and products with them."""

import functools
import operator
from collections.abc import Mapping
from typing import Protocol

from palm_mtf._tf import mtf, tf
from palm_mtf.accounting.params import parameter_dims, parameter_shapes
from palm_mtf.config.model import PalmConfig
from palm_mtf.config.parameter_names import ParameterName, parsed
from palm_mtf.model.dims import Dims
from palm_mtf.model.layers import embed, swiglu
from palm_mtf.model.sharding import gathered, gathered_einsum
from palm_mtf.ops.variables import Fill, Normal, sliced_variable


class Weights(Protocol):
  """Parameters of one model on one mesh, by their checkpoint names."""

  # The forward pass (palm.py) has two kinds: float32 variables that are
  # trained, below, and the joined kernels of decoding (decode/forward.py).

  mesh: mtf.Mesh

  def embed(self, tokens: mtf.Tensor) -> mtf.Tensor:
    """Returns rows of the embedding, [batch, length, d_model]."""

  def scale(self, name: str, after: mtf.Tensor) -> mtf.Tensor:
    """Returns the scale of a norm, [d_model] float32, once `after` is there."""

  def project_in(
    self, inputs: Mapping[str, mtf.Tensor], *, gated: bool
  ) -> list[mtf.Tensor]:
    """Multiplies x [batch, length, d_model] by several kernels.

    Args:
      inputs: x by kernel name; for keys and values [batch, memory_length,
        d_model].
      gated: whether the last two kernels are wi_gate and wi, for which one
        tensor is returned, swiglu(x wi_gate, x wi).

    Returns:
      [batch, length, outputs] of each kernel, activation dtype.
    """

  def project_out(self, branches: Mapping[str, mtf.Tensor]) -> mtf.Tensor:
    """Sums products, [batch, length, d_model], activation dtype.

    Args:
      branches: [batch, length, inputs] by kernel name.
    """

  def unembed(self, x: mtf.Tensor) -> mtf.Tensor:
    """Returns x embedding^T, [batch, length, vocab], activation dtype."""


def palm_variables(
  mesh: mtf.Mesh, config: PalmConfig, dims: Dims, seed: int | None = None
) -> dict[str, mtf.Tensor]:
  """Makes the variable of every parameter, by its checkpoint name.

  Args:
    mesh: mesh of one pod.
    config: the architecture.
    dims: its dimensions.
    seed: seed of the initial weights; None for zeros, over which a checkpoint
      is restored.

  Returns:
    Kernels and the embedding in the activation dtype, scales in float32.
  """
  sizes = parameter_shapes(config)  # of the vocabulary without its padding
  variables = {}
  for name, dim_names in parameter_dims(config).items():
    shape = [getattr(dims, dim) for dim in dim_names]
    stored = [dims.d_model_stored if x == dims.d_model else x for x in shape]
    parameter = parsed(name)
    variables[name] = sliced_variable(
      mesh,
      name,
      mtf.Shape(stored),
      initializer=_initializer(parameter, config, dim_names, seed),
      activation_dtype=tf.as_dtype(
        "float32" if parameter.is_scale else config.activation_dtype
      ),
      sizes=sizes[name],
    )
  return variables


def _initializer(
  parameter: ParameterName,
  config: PalmConfig,
  dims: tuple[str, ...],
  seed: int | None,
) -> Normal | Fill:
  """Returns the initial values of a parameter (PaLM 5)."""
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


class TrainedWeights:
  """Weights in float32 variables, cast where they are read."""

  def __init__(
    self,
    mesh: mtf.Mesh,
    config: PalmConfig,
    dims: Dims,
    seed: int | None = None,
  ):
    """Makes the variables; see `palm_variables`."""
    self.mesh = mesh
    self._dims = dims
    self._variables = palm_variables(mesh, config, dims, seed)
    # A block that is computed again gathers its kernels again anyway.
    self._gathers_again = config.remat != "layer"

  def embed(self, tokens: mtf.Tensor) -> mtf.Tensor:
    """Returns rows of the embedding; see `Weights`."""
    table = gathered(self._variables["embedding"], tokens, self._dims)
    return embed(table, tokens)

  def scale(self, name: str, after: mtf.Tensor) -> mtf.Tensor:
    """Returns the scale of a norm; see `Weights`."""
    scale = self._variables.get(f"{name}/scale")
    if scale is None:  # FINAL_NORM_SCALE
      return mtf.ones(self.mesh, mtf.Shape([self._dims.d_model]))
    return gathered(scale, after, self._dims)

  def project_in(
    self, inputs: Mapping[str, mtf.Tensor], *, gated: bool
  ) -> list[mtf.Tensor]:
    """Multiplies by each kernel alone; see `Weights`."""
    products = [
      self._product(x, name, self._variables[name].shape.dims[1:])
      for name, x in inputs.items()
    ]
    return [*products[:-2], swiglu(*products[-2:])] if gated else products

  def project_out(self, branches: Mapping[str, mtf.Tensor]) -> mtf.Tensor:
    """Adds up the products; see `Weights`."""
    # A sum over split `heads` or `d_ff` stays open until it is read
    # (mtf.LazyAllreduceSum): over one axis, both branches are one all-reduce.
    return functools.reduce(
      operator.add,
      [
        self._product(x, name, [self._dims.d_model])
        for name, x in branches.items()
      ],
    )

  def unembed(self, x: mtf.Tensor) -> mtf.Tensor:
    """Multiplies by the tied embedding; see `Weights`."""
    # The backward pass begins here: the gathered table is kept for it.
    return gathered_einsum(
      x,
      self._variables["embedding"],
      [*x.shape.dims[:2], self._dims.vocab],
      self._dims,
      again=False,
    )

  def _product(
    self, x: mtf.Tensor, name: str, outputs: list[mtf.Dimension]
  ) -> mtf.Tensor:
    return gathered_einsum(
      x,
      self._variables[name],
      [*x.shape.dims[:2], *outputs],  # batch, and length or memory_length
      self._dims,
      again=self._gathers_again,
    )
