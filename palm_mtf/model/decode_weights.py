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
from collections.abc import Mapping, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.accounting.params import parameter_shapes
from palm_mtf.config import PalmConfig
from palm_mtf.model.dims import Dims
from palm_mtf.model.products import make_kernel
from palm_mtf.variables import Fill, sliced_variable
from palm_mtf.whole_slice import split_axes


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
    )
    for name in parameter_shapes(config)
  }


@dataclasses.dataclass(frozen=True)
class DecodeWeights:
  """Every field is laid out: one value for each device.

  Attributes:
    table: [vocab, d_model], activation dtype: rows of the embedding.
    to_logits: the kernel [d_model, vocab].
    scales: of every norm in the order of the blocks, [d_model] float32; the
      last, of the final norm, times 1 / sqrt(d_model).
    kernels: of every layer, by name: "into" and "out" of the parallel block,
      "out" as "o" and "wo" where it cannot be one; "qkv", "o", "wi" and "wo"
      of the serial one.
    initialize: makes all of them of the checkpoint's variables.
  """

  table: mtf.placement_mesh_impl.PlacementMeshImpl.LaidOutTensor
  to_logits: mtf.placement_mesh_impl.PlacementMeshImpl.LaidOutTensor
  scales: list
  kernels: list[dict]
  initialize: tf.Operation


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
  kernel_dtype = tf.int8 if weight_dtype == "int8" else dtype
  initializers = []

  def laid_out(name):
    return mesh_impl.LaidOutTensor([each.value() for each in variables[name]])

  def keep(value, name, dtype=tf.float32):
    kernel = make_kernel(value, dtype, f"decode/{name}")
    initializers.extend(each.initializer for each in kernel.variables)
    return kernel

  def joined(names, axis, name):
    def join(*parts):
      flat = [_matrix(each, axis) for each in parts]
      return keep(tf.concat(flat, axis), name, kernel_dtype)

    return mesh_impl.slicewise(join, *map(laid_out, names))

  def scale(name, factor=1.0):
    return mesh_impl.slicewise(
      lambda x: keep(x * factor, name).value, laid_out(f"{name}/scale")
    )

  scales, kernels = [], []
  parts = product_parts(mesh_impl, config, dims)
  for layer in range(config.num_layers):
    name = f"layer_{layer:03d}"
    scales.append(scale(f"{name}/norm"))
    if config.block == "serial":
      scales.append(scale(f"{name}/mlp_norm"))
    kernels.append(
      {
        key: joined([f"{name}/{x}" for x in names], axis, f"{name}/{key}")
        for key, (names, axis) in parts.items()
      }
    )
  scales.append(scale("final_norm", config.d_model**-0.5))
  table = laid_out("embedding")
  return DecodeWeights(
    table=mesh_impl.slicewise(lambda x: keep(x, "table", dtype).value, table),
    to_logits=mesh_impl.slicewise(
      lambda x: keep(tf.transpose(x), "to_logits", dtype), table
    ),
    scales=scales,
    kernels=kernels,
    initialize=tf.group(initializers),
  )


def _matrix(kernel: tf.Tensor, axis: int) -> tf.Tensor:
  """Flattens [d_model, ...] (axis 1) or [..., d_model] (axis 0)."""
  shape = [-1, kernel.shape[-1]] if axis == 0 else [kernel.shape[0], -1]
  return tf.reshape(kernel, shape)
