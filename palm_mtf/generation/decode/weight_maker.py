# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes decoding weights from a checkpoint's parameters, on every device."""

import collections
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.adapters.merge import merged_reader
from palm_mtf.architecture.block import LOAD, NORMS, Projection
from palm_mtf.architecture.parameters import (
  RELATIVE,
  logits_table,
  parameter_dims,
  parse_name,
  read_dtype,
)
from palm_mtf.config import MeshLayout, ModelConfig
from palm_mtf.errors import UserError
from palm_mtf.generation.decode.kernels import (
  as_constant,
  find_largest,
  round_to_int4,
  round_to_int8,
)
from palm_mtf.generation.decode.weights import (
  DecodeModel,
  LayerWeights,
  joined_kernels,
)
from palm_mtf.mesh.cpu_gpu import CpuGpuPlacement, local_devices
from palm_mtf.mesh.slices import Slice
from palm_mtf.model.dims import Dims, model_dims
from palm_mtf.model.positions import project_distances
from palm_mtf.model.weights import logits_dtype, palm_variables
from palm_mtf.native.decoding import (
  BLOCK_FORMATS,
  BY_FLAGS,
  INT4,
  PackedKernel,
  Products,
  find_missing_in_step,
  pack,
)
from palm_mtf.native.operations import operations
from palm_mtf.ops.placement import LaidOut, Placement
from palm_mtf.ops.slicewise import split_axes
from palm_mtf.ops.variables import make_variable
from palm_mtf.ops.xla import in_xla_computation

_MOST_BYTES = 2**26  # of the parameters of layers that are loaded together
_KERNELS = ("embedding", "output_embedding")  # decoding has them as kernels
_logger = logging.getLogger(__name__)

# The decoding weights are made once from a checkpoint's float32 variables. The
# kernels are cast to the activation dtype or quantized, and joined where one
# matrix product replaces several. Norm scales and the embedding's rows are
# never quantized. A layer's weights depend only on the layer's own variables,
# so that host memory need not hold two layers of a checkpoint at once.


def build_decode_model(
  config: ModelConfig,
  mesh_layout: MeshLayout,
  weight_dtype: str,
  products: Products = BY_FLAGS,
) -> DecodeModel:
  """Builds a checkpoint's variables and decoding weights in the current graph.

  `products` says which executors multiply by packed kernels.
  The caller has checked the layout rules of `mesh_layout` against `config`.
  """
  mesh = mtf.Mesh(mtf.Graph(), "pod")
  dims = model_dims(config, 1, mesh_layout)
  # Each device holds all of d_model, whatever the layout, because gathering
  # weights for each token would cost more than the rest of a step.
  dims = dataclasses.replace(
    dims, d_model_stored=dims.d_model, d_model_residual=dims.d_model
  )
  palm_variables([mesh], config, dims)
  placement = local_devices(mesh_layout.num_devices).placement(mesh_layout, 0)
  (slices,) = placement.lower({mesh: placement}).slices
  is_packed = _steps_in_cpp(placement, config)

  def read(name: str) -> LaidOut:
    values = [part.variable.value() for part in slices[name]]
    return placement.LaidOutTensor(values)

  merged = merging_reader(placement, config, dims, read)
  config = config.merged
  maker = WeightMaker(
    *(placement, config, dims, merged, weight_dtype),
    products=products if is_packed else None,
  )
  weights: dict[str, LaidOut] = {}
  for layer in (None, *range(config.num_layers)):
    weights |= maker.make(layer)
  layers = maker.make_layers(slices)
  return DecodeModel(placement, config, dims, weights, is_packed, layers)


def merging_reader(
  placement: Placement,
  config: ModelConfig,
  dims: Dims,
  read: Callable[[str], LaidOut],
) -> Callable[[str], LaidOut]:
  """Returns a reader of the parameters of `config.merged`.

  `read` returns a float32 parameter of the base or of its adapter; `dims` are
  those of its results.
  """

  def allreduce(squares: LaidOut, of: Projection) -> LaidOut:
    axes = split_axes(placement, [getattr(dims, x) for x in of.inputs])
    return placement.allreduce(squares, axes, "SUM")

  return merged_reader(config, read, tf, placement.slicewise, allreduce)


def _steps_in_cpp(placement: CpuGpuPlacement, config: ModelConfig) -> bool:
  if placement.size > 1 or "gpu" in placement.devices[0].lower():
    return False
  if missing := find_missing_in_step(config):
    _tell_missing(missing, repr(getattr(config, missing.lower())))
    return False
  return operations() is not None


@functools.cache  # so that a process logs this once
def _tell_missing(name: str, value: str) -> None:
  _logger.info(
    f"{name} = {value}: TensorFlow computes the decoding steps, because the "
    "faster C++ step lacks this value"
  )


class WeightMaker:
  """Makes decoding weights, and collects the weights' initializers.

  TensorFlow variables keep the weights. In an XLA computation, the weights are
  tensors that the computation returns, because accelerators keep JAX arrays.
  """

  def __init__(
    self,
    placement: Placement,
    config: ModelConfig,
    dims: Dims,
    read: Callable[[str], LaidOut],
    weight_dtype: str,
    *,
    products: Products | None,
  ):
    """Takes the settings, and `read`, which returns a float32 parameter.

    `dims` are for devices that each hold all of d_model. `products` says which
    executors multiply by packed kernels; None to pack no kernels.
    """
    self._impl, self._config, self._read = placement, config, read
    self._is_packed = products is not None
    self._products = products or BY_FLAGS
    self._is_quantized = weight_dtype != "activation"
    self._has_blocks = weight_dtype in BLOCK_FORMATS
    if self._has_blocks and not self._is_packed:
      nearest = "int4" if weight_dtype == "q4_k" else "int8"
      raise UserError(
        f"WEIGHT_DTYPE = {weight_dtype!r}: only decoding steps in C++ read its "
        "blocks: on one CPU device, with a C++ compiler, and for the layers "
        f'that docs/decoding.md names; set it to "{nearest}".'
      )
    self._dtype = weight_dtype
    if not self._has_blocks:
      self._dtype = tf.as_dtype(
        weight_dtype if self._is_quantized else config.activation_dtype
      )
    self._dims = {
      name: [getattr(dims, dim) for dim in names]
      for name, names in parameter_dims(config).items()
    }
    # {number of a layer, or None: initializers of its decoding weights}. After
    # these have run, the layer's parameters can be freed.
    self._initializers: dict[int | None, list] = collections.defaultdict(list)

  def make(self, layer: int | None) -> dict[str, LaidOut]:
    """Returns a layer's decoding weights, by name.

    If `layer` is None, returns the decoding weights outside of all layers.

    For the names see `DecodeModel`. Scales and biases are float32. Tables have
    the activation dtype: the embedding; learned positions, [positions,
    d_model]; and Transformer-XL's vectors of distances, [positions, heads,
    d_kv], already multiplied by their kernel.
    """
    config, values = self._config, {}
    for name in self._dims:
      parameter = parse_name(name)
      is_distances = parameter.part == RELATIVE
      if parameter.layer != layer or parameter.part in (LOAD, *_KERNELS):
        continue
      is_kept = parameter.is_float32 or not parameter.is_kernel
      if not (is_kept or is_distances):
        continue
      values[name] = self._read(name)
      if is_distances:
        values[name] = self._impl.slicewise(
          lambda w: project_distances(w, config.sequence_length), values[name]
        )
    if layer is None:
      values["table"] = self._read("embedding")
      if config.final_norm_scale == "none":
        scale = 1.0 - NORMS[config.norm].scale_offset
        values["final_norm/scale"] = self._impl.slicewise(
          lambda x: tf.fill(x.shape[1:], scale), values["table"]
        )

    found = {}
    for name, x in values.items():
      cast = functools.partial(tf.cast, dtype=read_dtype(name, config))
      found[name] = self._keep(name, cast, x)
    if layer is None:
      return {**found, "to_logits": self._make_logits_kernel()}
    joined = joined_kernels(config, layer, is_packed=self._is_packed)
    found |= {each.names[0]: self._join(*each) for each in joined}
    own = (x for x in self._dims if parse_name(x).layer == layer)
    experts = [x for x in own if parse_name(x).is_expert]
    if experts and self._is_packed:
      *inputs, output = experts
      return found | {x[0]: self._pack(x) for x in (inputs, [output])}
    return found | {name: self._stack(name) for name in experts}

  def _pack(self, names):
    # Joins kernels of all experts, as `_join` joins others.
    return self._keep(
      names[0],
      lambda *values: pack(values, self._dtype),
      *map(self._read, names),
    )

  def _stack(self, name):
    """Keeps a kernel of all experts, [experts, inner, outer]."""
    largest = []
    if self._dtype == tf.int8:
      largest = [self._impl.slicewise(find_largest, self._read(name))]
      # A mesh axis may split the rows of wo, which share a scale.
      axes = split_axes(self._impl, self._dims[name][1:2])
      largest = [self._impl.allreduce(x, axes, "MAX") for x in largest]

    def make(whole, *largest):
      if self._dtype == INT4:
        whole = tf.stack([round_to_int4(x) for x in tf.unstack(whole)])
      elif self._dtype == tf.int8:
        whole = round_to_int8(whole, *largest)
      return as_constant(whole, self._config.activation_dtype)

    return self._keep(name, make, self._read(name), *largest)

  def _keep(self, name, make, *values):
    # Returns the result of make(*values) on each device: a tensor, or a
    # PackedKernel. Except in an XLA computation, a variable keeps the result;
    # the variable's initializer is added to `_initializers`.
    def keep(x):
      if in_xla_computation():
        return x
      if isinstance(x, PackedKernel):
        panels = keep(x.panels)
        return dataclasses.replace(x, panels=panels, products=self._products)
      kept = make_variable(x, f"decode/{name}")
      self._initializers[parse_name(name).layer].append(kept.initializer)
      return kept.value()

    return self._impl.slicewise(lambda *values: keep(make(*values)), *values)

  def _make_logits_kernel(self):
    # If the layers' kernels are quantized, quantize the logits' kernel too.
    # In the activation dtype, this kernel would be half of the bytes that a
    # decoding step reads.
    is_quantized = self._is_quantized
    quantized = "q6_k" if self._has_blocks else tf.int8
    # Round the weights to the activation dtype, as training does, even if
    # `dtype` is wider.
    rounded_to = tf.as_dtype(self._config.activation_dtype)
    dtype = rounded_to if self._is_packed else logits_dtype(self._config)

    def make(x):
      if self._is_packed:
        return pack(
          [x],
          quantized if is_quantized else dtype,
          is_transposed=True,
          # A table that was imported in q6_k keeps its numbers.
          is_rounded=rounded_to == tf.bfloat16 and not self._has_blocks,
        )
      w = tf.cast(tf.transpose(x), rounded_to)
      if is_quantized:
        w = tf.cast(w, tf.float32)
        w = round_to_int8(w, find_largest(w))
      return as_constant(w, dtype)

    table = self._read(logits_table(self._config))
    return self._keep("to_logits", make, table)

  def make_layers(
    self, slices: Mapping[str, Sequence[Slice]]
  ) -> list[LayerWeights]:
    """Returns the `LayerWeights` of each layer, or of several small layers.

    Call this method after `make` of all layers: it uses the initializers that
    `make` collects. `slices` is {checkpoint variable: its slices}.
    """
    by_layer: dict[int | None, dict] = collections.defaultdict(dict)
    for name, parts in slices.items():
      by_layer[parse_name(name).layer][name] = parts
    # Join small layers, because each call of a session goes through the whole
    # graph, which takes longer than to load a small layer.
    groups: list[tuple[dict, list]] = []
    num_bytes = 0
    for layer, some in by_layer.items():
      every = (x for parts in some.values() for x in parts)
      more = sum(4 * x.variable.shape.num_elements() for x in every)
      num_bytes += more
      if not groups or num_bytes > _MOST_BYTES:
        groups.append(({}, []))
        num_bytes = more
      groups[-1][0].update(some)
      groups[-1][1].extend(self._initializers[layer])
    layers = []
    for some, initializers in groups:
      with tf.control_dependencies(initializers):
        free = [
          tf.raw_ops.DestroyResourceOp(resource=each.variable.handle)
          for parts in some.values()
          for each in parts
        ]
      layers.append(LayerWeights(some, tf.group(free)))
    return layers

  def _join(self, names, summed):
    axis = self._find_axis(names[0])
    rounds = self._dtype == tf.int8 and not self._is_packed
    shared = [self._find_largest(summed)] if summed and rounds else []

    def make(*values):
      parts, largest = values[: len(names)], values[len(names) :]
      if self._is_packed:
        return pack(parts, self._dtype, joins_rows=axis == 0)
      whole = tf.concat(parts, axis)
      # Round the weights as for int8 or int4, but keep a float dtype, because
      # TensorFlow multiplies by float weights.
      if self._dtype == INT4:
        whole = round_to_int4(whole)
      elif self._dtype == tf.int8:
        whole = round_to_int8(whole, *(largest or [find_largest(whole)]))
      return as_constant(whole, self._config.activation_dtype)

    matrices = [self._make_matrix(name) for name in names]
    return self._keep(names[0], make, *matrices, *shared)

  def _find_axis(self, name):
    # Returns the axis of a kernel's matrix that is not d_model: 1 for q,
    # [d_model, heads * d_kv], and 0 for o, [heads * d_kv, d_model].
    return int(self._dims[name][0].name == "d_model")

  def _make_matrix(self, name):
    axis = self._find_axis(name)

    def flatten(x):
      if x.shape.rank == 2:
        return x
      return tf.reshape(x, [x.shape[0], -1] if axis else [-1, x.shape[-1]])

    return self._impl.slicewise(flatten, self._read(name))

  def _find_largest(self, names):
    # Returns max |w| of each output column over all `names`, which share int8
    # scales. C++ operations pack these kernels into one matrix with one scale
    # per column, and no layout may change the rounded weights.
    found = []
    for name in names:
      largest = self._impl.slicewise(find_largest, self._make_matrix(name))
      axes = split_axes(self._impl, self._dims[name])
      found.append(self._impl.allreduce(largest, axes, "MAX"))
    slicewise_maximum = functools.partial(self._impl.slicewise, tf.maximum)
    return functools.reduce(slicewise_maximum, found)
