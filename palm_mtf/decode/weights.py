# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The weights of a model as decoding reads them, on every device of a mesh.

They are made once of the checkpoint's float32 variables: cast to the activation
dtype or rounded to int8, and those that meet the same input joined into one
product. In the parallel block q, k, v, wi_gate and wi are one product, and o
and wo another one, unless their sums run over different mesh axes. Norms and
the embedding are never int8.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.accounting.params import parameter_shapes
from palm_mtf.config.model import PalmConfig
from palm_mtf.config.parameter_names import layer_name
from palm_mtf.decode.matmul import (
  constant_variable,
  largest_numbers,
  make_kernel,
)
from palm_mtf.model.dims import Dims
from palm_mtf.ops.slicewise import split_axes
from palm_mtf.ops.variables import Fill, sliced_variable


def checkpoint_variables(
  mesh: mtf.Mesh, config: PalmConfig, dims: Dims
) -> dict[str, mtf.Tensor]:
  """Makes the variables of model/palm.py, to be restored, by name."""
  kv = [dims.d_kv]
  if config.attention == "multi_head":
    kv.insert(0, dims.heads)
  dims_of = {
    "embedding": [dims.vocab, dims.d_model],
    "scale": [dims.d_model],
    "q": [dims.d_model, dims.heads, dims.d_kv],
    "k": [dims.d_model, *kv],
    "v": [dims.d_model, *kv],
    "o": [dims.heads, dims.d_kv, dims.d_model],
    "wi_gate": [dims.d_model, dims.d_ff],
    "wi": [dims.d_model, dims.d_ff],
    "wo": [dims.d_ff, dims.d_model],
  }
  return {
    name: sliced_variable(
      mesh,
      name,
      mtf.Shape(dims_of[name.rsplit("/", 1)[-1]]),
      initializer=Fill(0.0),
      sizes=shape,
    )
    for name, shape in parameter_shapes(config).items()
  }


@dataclasses.dataclass(frozen=True)
class DecodeWeights:
  """Every field is laid out: one value for each device.

  Attributes:
    table: [vocab, d_model], activation dtype: rows of the embedding.
    to_logits: the kernel [d_model, vocab].
    scales: scales of every norm in the order of the blocks, [d_model] float32;
      the last, of the final norm, times 1 / sqrt(d_model).
    kernels: kernels of every layer, by name: "into" and "out" of the parallel
      block, "out" as "o" and "wo" where it cannot be one; "qkv", "o", "wi" and
      "wo" of the serial one.
    initialize: makes all of them of the checkpoint's variables.
    is_int8: whether the kernels are; `to_logits` never is.
  """

  table: mtf.placement_mesh_impl.PlacementMeshImpl.LaidOutTensor
  to_logits: mtf.placement_mesh_impl.PlacementMeshImpl.LaidOutTensor
  scales: list
  kernels: list[dict]
  initialize: tf.Operation
  is_int8: bool


# The parts of each product, and the dimension along which they are joined.
_PARALLEL = {
  "into": (("attention/q", "attention/k", "attention/v", "mlp/wi_gate",
            "mlp/wi"), 1),
  "out": (("attention/o", "mlp/wo"), 0),
}  # fmt: skip
_SERIAL = {
  "qkv": (("attention/q", "attention/k", "attention/v"), 1),
  "o": (("attention/o",), 0),
  "wi": (("mlp/wi_gate", "mlp/wi"), 1),
  "wo": (("mlp/wo",), 0),
}


def product_parts(
  mesh_impl: mtf.MeshImpl, config: PalmConfig, dims: Dims
) -> dict[str, tuple[tuple[str, ...], int]]:
  """Returns of which variables each product of a layer is made."""
  if config.block == "serial":
    return _SERIAL
  same_axes = split_axes(mesh_impl, [dims.heads]) == split_axes(
    mesh_impl, [dims.d_ff]
  )
  if same_axes:
    return _PARALLEL
  return {"into": _PARALLEL["into"], "o": _SERIAL["o"], "wo": _SERIAL["wo"]}


def make_weights(
  mesh_impl: mtf.MeshImpl,
  config: PalmConfig,
  dims: Dims,
  variables: Mapping[str, Sequence[tf.Variable]],
  weight_dtype: str,
) -> DecodeWeights:
  """Makes what decoding reads.

  Args:
    mesh_impl: the devices and the layout.
    config: the architecture.
    dims: its dimensions.
    variables: the slices of every variable, by its checkpoint name.
    weight_dtype: "activation", the model's activation dtype, or "int8".
  """
  dtype = tf.as_dtype(config.activation_dtype)
  maker = _Maker(mesh_impl, dims, variables)
  kernel_dtype = tf.int8 if weight_dtype == "int8" else dtype
  parts = product_parts(mesh_impl, config, dims)
  scales, kernels = [], []
  for layer in range(config.num_layers):
    name = layer_name(layer)
    scales.append(maker.scale(f"{name}/norm"))
    if config.block == "serial":
      scales.append(maker.scale(f"{name}/mlp_norm"))
    kernels.append(maker.kernels(name, parts, config.block, kernel_dtype))
  scales.append(maker.scale("final_norm", config.d_model**-0.5))
  table = maker.laid_out("embedding")
  to_logits = mesh_impl.slicewise(tf.transpose, table)
  return DecodeWeights(
    table=maker.constant("table", dtype, table),
    to_logits=maker.kept("to_logits", dtype, to_logits),
    scales=scales,
    kernels=kernels,
    initialize=tf.group(maker.initializers),
    is_int8=weight_dtype == "int8",
  )


class _Maker:
  """Makes variables of variables, and collects what initializes them."""

  def __init__(
    self,
    mesh_impl: mtf.MeshImpl,
    dims: Dims,
    variables: Mapping[str, Sequence[tf.Variable]],
  ):
    self._impl = mesh_impl
    self._variables = variables
    # What the sums of the products that end a branch run over.
    self._summed = {"o": dims.heads, "wo": dims.d_ff}
    self.initializers = []

  def laid_out(self, name):
    """Returns a variable of the checkpoint."""
    return self._impl.LaidOutTensor([v.value() for v in self._variables[name]])

  def kept(self, name, dtype, value, *largest):
    """Returns the kernel whose first value is `value`."""

    def keep(value, *largest):
      kernel = make_kernel(value, dtype, f"decode/{name}", *largest)
      self.initializers.append(kernel.initialize)
      return kernel

    return self._impl.slicewise(keep, value, *largest)

  def constant(self, name, dtype, value):
    """Returns what a variable holds whose first value is `value`."""

    def keep(value):
      kept = constant_variable(tf.cast(value, dtype), f"decode/{name}")
      self.initializers.append(kept.initializer)
      return kept.value()

    return self._impl.slicewise(keep, value)

  def scale(self, name, factor=1.0):
    """Returns the scale of a norm times `factor`."""
    value = self.laid_out(f"{name}/scale")
    value = self._impl.slicewise(lambda x: x * factor, value)
    return self.constant(f"{name}/scale", tf.float32, value)

  def kernels(self, layer, parts, block, dtype):
    """Returns the kernel of each product of a layer."""
    kernels = {}
    for key, (names, axis) in parts.items():
      matrices = [self._matrix(f"{layer}/{name}", axis) for name in names]
      whole = self._impl.slicewise(
        lambda *x, a=axis: tf.concat(x, a), *matrices
      )
      largest = []
      if dtype == tf.int8 and axis == 0:
        # Both branches of a parallel block end in one sum, with one scale.
        ends = _PARALLEL["out"][0] if block == "parallel" else names
        largest.append(self._largest_of([f"{layer}/{name}" for name in ends]))
      kernels[key] = self.kept(f"{layer}/{key}", dtype, whole, *largest)
    return kernels

  def _matrix(self, name, axis):
    """Returns [d_model, the rest] (axis 1) or [the rest, d_model] (axis 0)."""

    def flat(x):
      shape = [-1, x.shape[-1]] if axis == 0 else [x.shape[0], -1]
      return tf.reshape(x, shape)

    return self._impl.slicewise(flat, self.laid_out(name))

  def _largest_of(self, names):
    """Returns the largest number of each output channel, over all slices."""
    found = []
    for name in names:
      largest = self._impl.slicewise(
        lambda x: largest_numbers(x, 0), self._matrix(name, 0)
      )
      axes = split_axes(self._impl, [self._summed[name.rsplit("/", 1)[-1]]])
      if axes:
        largest = self._impl.allreduce(largest, axes, "MAX")
      found.append(largest)
    return self._impl.slicewise(
      lambda *x: functools.reduce(tf.maximum, x), *found
    )
