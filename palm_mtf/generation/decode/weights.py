# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights of a model for decoding, on every device of a mesh."""

import collections
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.accounting.architecture import (
  layer_name,
  parameter_dims,
  parse_name,
)
from palm_mtf.config import PalmConfig
from palm_mtf.generation.decode.matmul import (
  constant_variable,
  largest_numbers,
  make_kernel,
  make_packed_kernel,
  rounded_to_int4,
)
from palm_mtf.machine.processors import bfloat16_flags
from palm_mtf.model.dims import Dims
from palm_mtf.model.weights import logits_dtype
from palm_mtf.native.decoding import INT4, pack
from palm_mtf.native.operations import operations
from palm_mtf.ops.slicewise import split_axes

# They are made once from a checkpoint's float32 variables: cast to the
# activation dtype or quantized, and joined where one product does for several.
# Norms and the embedding's rows are never quantized. A layer's are made of its
# own variables alone, so that these need not all be in memory at once.

LaidOut = mtf.placement_mesh_impl.PlacementMeshImpl.LaidOutTensor

# Kernels of a layer that read one input: always one product.
_QKV = ("attention/q", "attention/k", "attention/v")
_GATES = ("mlp/wi_gate", "mlp/wi")
_INPUTS = {"parallel": [(*_QKV, *_GATES)], "serial": [_QKV, _GATES]}
# Kernels of a layer whose products are summed: one product where that is free.
_OUTPUTS = {
  "parallel": [("attention/o", "mlp/wo")],
  "serial": [("attention/o",), ("mlp/wo",)],
}


@dataclasses.dataclass(frozen=True)
class JoinedKernel:
  """Kernels of one product."""

  kernel: LaidOut  # `Kernel` [inner, outer] of each device
  dims: list[list[mtf.Dimension]]  # of each part, beside d_model


@dataclasses.dataclass(frozen=True)
class DecodeWeights:
  """Weights of one model on one mesh."""

  impl: mtf.MeshImpl
  config: PalmConfig
  dims: Dims  # batch and length are those of no program, and not read
  table: LaidOut  # embedding, [vocab, d_model], activation dtype
  to_logits: LaidOut  # `Kernel` [d_model, vocab] of each device: its transpose
  scales: dict[str, LaidOut]  # [d_model] float32, by checkpoint name
  kernels: dict[tuple[str, ...], JoinedKernel]  # by names of their parts
  is_packed: bool  # whether kernels are, for the operations of `native`
  quantizes_rows: bool  # whether a product of a layer reads int8 numbers
  quantizes_logit_rows: bool  # whether that with `to_logits` does
  # From the checkpoint's variables, by layer (`ParameterName.layer`).
  initialize: dict[int | None, tf.Operation]

  def last_scale(self) -> LaidOut:
    """Returns the scale of the last norm times 1/sqrt(d_model), [d_model]."""
    # The factor is that of the logits, as in model/palm.py.
    return self.impl.slicewise(
      lambda scale: scale * self.config.d_model**-0.5,
      self.scales["final_norm/scale"],
    )


def make_weights(
  mesh_impl: mtf.MeshImpl,
  config: PalmConfig,
  dims: Dims,
  variables: Mapping[str, Sequence[tf.Variable]],
  weight_dtype: str,
) -> DecodeWeights:
  """Makes weights for decoding.

  Args:
    mesh_impl: devices and layout.
    config: the architecture.
    dims: its dimensions.
    variables: slices of every variable, by its checkpoint name.
    weight_dtype: WEIGHT_DTYPE.
  """
  is_packed = _is_packed(mesh_impl, config, weight_dtype)
  maker = _Maker(mesh_impl, config, dims, variables, weight_dtype, is_packed)
  dtype = tf.as_dtype(config.activation_dtype)
  of_logits = dtype if is_packed else logits_dtype(config)
  is_quantized = weight_dtype != "activation"
  if is_quantized:
    # The largest product: in the activation dtype it would be half the bytes of
    # a step with int4. A token's row has a scale of its own.
    of_logits = tf.int8
  table = maker.laid_out("embedding")
  scales = {
    name: maker.laid_out(name)
    for name in variables
    if parse_name(name).is_scale
  }
  if config.final_norm_scale == "none":
    scales["final_norm/scale"] = mesh_impl.slicewise(
      lambda x: tf.ones(x.shape[1:]), table
    )
  return DecodeWeights(
    impl=mesh_impl,
    config=config,
    dims=dims,
    table=maker.constant("table", dtype, table),
    to_logits=maker.to_logits(of_logits, table, dtype),
    scales={
      name: maker.constant(name, tf.float32, value)
      for name, value in scales.items()
    },
    kernels=dict(maker.joined_kernels()),
    is_packed=is_packed,
    quantizes_rows=maker.quantizes_rows,
    quantizes_logit_rows=is_quantized and not is_packed,
    initialize={
      layer: tf.group(some) for layer, some in maker.initializers.items()
    },
  )


def _is_packed(
  mesh_impl: mtf.MeshImpl, config: PalmConfig, weight_dtype: str
) -> bool:
  """Returns whether the operations of `native` serve these weights."""
  if mesh_impl.size > 1 or "gpu" in mesh_impl.devices[0].lower():
    return False
  # AMX multiplies the many rows of a prompt faster than they do.
  is_bfloat16 = (weight_dtype, config.activation_dtype) == (
    "activation",
    "bfloat16",
  )
  if is_bfloat16 and "amx_bf16" in bfloat16_flags():
    return False
  return operations() is not None


class _Maker:
  """Makes variables from variables, and collects what initializes them."""

  def __init__(
    self, mesh_impl, config, dims, variables, weight_dtype, is_packed
  ):
    self._impl = mesh_impl
    self._config = config
    self._variables = variables
    self._is_packed = is_packed
    self._dtype = tf.as_dtype(
      config.activation_dtype if weight_dtype == "activation" else weight_dtype
    )
    self.quantizes_rows = self._dtype == tf.int8 and not is_packed
    self._dims = {
      name: [getattr(dims, dim) for dim in names]
      for name, names in parameter_dims(config).items()
    }
    # By layer.
    self.initializers = collections.defaultdict(list)

  def laid_out(self, name):
    """Returns a variable of the checkpoint."""
    return self._impl.LaidOutTensor([v.value() for v in self._variables[name]])

  def constant(self, name, dtype, value):
    """Returns the content of a variable whose first value is `value`."""

    def make(value):
      kept = constant_variable(tf.cast(value, dtype), f"decode/{name}")
      self.initializers[parse_name(name).layer].append(kept.initializer)
      return kept.value()

    return self._impl.slicewise(make, value)

  def kernel(self, name, make, *values):
    """Returns the kernel that `make` makes of its values and a name."""

    def make_and_keep(*values):
      kernel = make(*values, name=f"decode/{name}")
      self.initializers[parse_name(name).layer].append(kernel.initialize)
      return kernel

    return self._impl.slicewise(make_and_keep, *values)

  def to_logits(self, dtype, table, rounded_to):
    """Returns the kernel of the logits, of `dtype`: the transposed table."""

    # Rounded as the table is, also where the product is not.
    def packed(x, name):
      is_rounded = rounded_to == tf.bfloat16
      panels = pack([x], dtype, is_transposed=True, is_rounded=is_rounded)
      return make_packed_kernel(panels, name)

    def plain(x, name):
      return make_kernel(tf.cast(tf.transpose(x), rounded_to), dtype, name)

    return self.kernel("to_logits", packed if self._is_packed else plain, table)

  def joined_kernels(self) -> Iterator[tuple[tuple[str, ...], JoinedKernel]]:
    """Yields the kernels of all layers, by the names of their parts."""
    block = self._config.block
    for layer in range(self._config.num_layers):

      def named(parts, layer=layer):
        return tuple(f"{layer_name(layer)}/{part}" for part in parts)

      for inputs, outputs in zip(_INPUTS[block], _OUTPUTS[block], strict=True):
        yield named(inputs), self._joined(named(inputs))
        names = named(outputs)
        largest = [self._largest(names)] if self.quantizes_rows else []
        axes = {tuple(split_axes(self._impl, self._dims[x])) for x in names}
        # To quantize or pack the inputs is a pass over them that joins them as
        # well; a pass that does nothing else costs more than a second product.
        # And sums over different mesh axes are all-reduced apart.
        joins = self.quantizes_rows or self._is_packed
        can_join = joins and len(axes) == 1
        for some in [names] if can_join else [(name,) for name in names]:
          yield some, self._joined(some, *largest)

  def _joined(self, names, *largest):
    reads, axis = self._beside_d_model(names[0])

    def packed(*parts, name):
      panels = pack(parts, self._dtype, joins_rows=axis == 0)
      return make_packed_kernel(panels, name)

    def plain(*parts, name):
      parts, largest = parts[: len(names)], parts[len(names) :]
      whole, dtype = tf.concat(parts, axis), self._dtype
      if dtype == INT4:
        # TensorFlow has no product with 4 bits: what they lose is the same.
        dtype = tf.as_dtype(self._config.activation_dtype)
        whole = rounded_to_int4(whole)
      return make_kernel(whole, dtype, name, *largest)

    make = packed if self._is_packed else plain
    matrices = [self._matrix(name) for name in names]
    return JoinedKernel(
      self.kernel(names[0], make, *matrices, *largest),
      [self._dims[name][reads] for name in names],
    )

  def _beside_d_model(self, name):
    # q is [d_model, heads, d_kv], a matrix [d_model, the rest]; o is [heads,
    # d_kv, d_model], a matrix [the rest, d_model]. Returns where the rest is,
    # in the kernel and in the matrix.
    is_input = self._dims[name][0].name == "d_model"
    return (slice(1, None), 1) if is_input else (slice(None, -1), 0)

  def _matrix(self, name):
    _, axis = self._beside_d_model(name)

    def matrix(x):
      return tf.reshape(x, [x.shape[0], -1] if axis else [-1, x.shape[-1]])

    return self._impl.slicewise(matrix, self.laid_out(name))

  def _largest(self, names):
    # Kernels whose products are summed share a scale for each output: int8 sums
    # are added as they are, whether of one product or of several devices.
    found = []
    for name in names:
      largest = self._impl.slicewise(
        lambda x: largest_numbers(x, 0), self._matrix(name)
      )
      axes = split_axes(self._impl, self._dims[name])
      found.append(self._impl.allreduce(largest, axes, "MAX"))
    return self._impl.slicewise(
      lambda *x: functools.reduce(tf.maximum, x), *found
    )
