# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes decoding weights from a checkpoint's parameters, on every device."""

import collections
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.block import NORMS, model_of
from palm_mtf.architecture.parameters import (
  RELATIVE,
  layer_name,
  logits_table,
  parameter_dims,
  parse_name,
)
from palm_mtf.config import MeshLayout, ModelConfig
from palm_mtf.generation.decode.kernels import (
  find_largest,
  make_kernel,
  make_packed_kernel,
  round_to_int4,
  round_to_int8,
)
from palm_mtf.generation.decode.weights import DecodeModel, LayerWeights
from palm_mtf.mesh.cpu_gpu import CpuGpuPlacement, local_devices
from palm_mtf.mesh.slices import Slice
from palm_mtf.model.dims import Dims, model_dims
from palm_mtf.model.positions import project_distances
from palm_mtf.model.weights import logits_dtype, palm_variables
from palm_mtf.native.decoding import INT4, find_missing_in_step, pack
from palm_mtf.native.operations import operations
from palm_mtf.ops.placement import LaidOut, Placement
from palm_mtf.ops.slicewise import split_axes
from palm_mtf.ops.variables import make_variable
from palm_mtf.ops.xla import in_xla_computation

_logger = logging.getLogger(__name__)

# The decoding weights are made once from a checkpoint's float32 variables. The
# kernels are cast to the activation dtype or quantized, and joined where one
# matrix product replaces several. Norm scales and the embedding's rows are
# never quantized. A layer's weights depend only on the layer's own variables,
# so that host memory need not hold two layers of a checkpoint at once.


def build_decode_model(
  config: ModelConfig, mesh_layout: MeshLayout, weight_dtype: str
) -> DecodeModel:
  """Builds a checkpoint's variables and decoding weights in the current graph.

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

  maker = WeightMaker(
    placement, config, dims, read, weight_dtype, is_packed=is_packed
  )
  return DecodeModel(
    placement=placement,
    config=config,
    dims=dims,
    table=maker.make_table(),
    to_logits=maker.make_logits_kernel(),
    vectors={
      name: x
      for layer in (None, *range(config.num_layers))
      for name, x in maker.make_vectors(layer).items()
    },
    kernels={
      names: x
      for layer in range(config.num_layers)
      for names, x in maker.make_joined_kernels(layer)
    },
    is_packed=is_packed,
    layers=maker.make_layers(slices),
  )


def _steps_in_cpp(placement: CpuGpuPlacement, config: ModelConfig) -> bool:
  if placement.size > 1 or "gpu" in placement.devices[0].lower():
    return False
  if missing := find_missing_in_step(config):
    _tell_missing(missing, getattr(config, missing.lower()))
    return False
  return operations() is not None


@functools.cache  # so that a process logs this once
def _tell_missing(name: str, value: object) -> None:
  _logger.info(
    f"{name} = {value!r}: TensorFlow computes the decoding steps, because the "
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
    is_packed: bool,
  ):
    """Takes the settings, and `read`, which returns a float32 parameter.

    `dims` are for devices that each hold all of d_model. `is_packed` says
    whether kernels are packed for C++ operations.
    """
    self._impl, self._config, self._read = placement, config, read
    self._is_packed = is_packed
    self._is_quantized = weight_dtype != "activation"
    self._dtype = tf.as_dtype(
      weight_dtype if self._is_quantized else config.activation_dtype
    )
    self._dims = {
      name: [getattr(dims, dim) for dim in names]
      for name, names in parameter_dims(config).items()
    }
    # {number of a layer, or None: initializers of its decoding weights}. After
    # these have run, the layer's parameters can be freed.
    self._initializers = collections.defaultdict(list)

  def make_table(self) -> LaidOut:
    """Returns the embedding, [vocab, d_model], activation dtype."""
    return self._make_constant(
      "table", self._config.activation_dtype, self._read("embedding")
    )

  def make_vectors(self, layer: int | None) -> dict[str, LaidOut]:
    """Returns {name: scale, bias or table of positions}.

    Scales and biases are float32. Tables have the activation dtype: learned
    positions, [positions, d_model], and Transformer-XL's vectors of distances,
    [positions, heads, d_kv], already multiplied by their kernel.
    `layer` is the layer's number; None for weights outside of the layers.
    """
    config, found = self._config, {}
    for name in self._dims:
      parameter, dtype = parse_name(name), config.activation_dtype
      is_distances = parameter.part == RELATIVE
      is_table = parameter.part == "position_embedding" or is_distances
      if parameter.layer != layer or not (parameter.is_vector or is_table):
        continue
      value = self._read(name)
      if is_distances:
        value = self._impl.slicewise(
          lambda w: project_distances(w, config.sequence_length), value
        )
      found[name] = self._make_constant(
        name, "float32" if parameter.is_vector else dtype, value
      )
    if layer is None and config.final_norm_scale == "none":
      name, scale = "final_norm/scale", 1.0 - NORMS[config.norm].scale_offset
      ones = self._impl.slicewise(
        lambda x: tf.fill(x.shape[1:], scale), self._read("embedding")
      )
      found[name] = self._make_constant(name, "float32", ones)
    return found

  def _make_constant(self, name: str, dtype: str, value: LaidOut) -> LaidOut:
    def make(value):
      value = tf.cast(value, dtype)
      if in_xla_computation():
        return value
      kept = make_variable(value, f"decode/{name}")
      self._initializers[parse_name(name).layer].append(kept.initializer)
      return kept.value()

    return self._impl.slicewise(make, value)

  def _make_kernel(self, name, make, *values):
    # Returns make(*values, name=...) of each device; collects the initializers.
    def make_and_keep(*values):
      kernel = make(*values, name=f"decode/{name}")
      self._initializers[parse_name(name).layer].append(kernel.initialize)
      return kernel

    return self._impl.slicewise(make_and_keep, *values)

  def make_logits_kernel(self) -> LaidOut:
    """Makes the kernel of the logits: the transposed table."""
    # If layers' kernels are int8 or int4, the logits' kernel is int8. In the
    # activation dtype, it would be half of the bytes that a step reads.
    is_quantized = self._is_quantized
    # Round the weights to the activation dtype, as training does, even if
    # `dtype` is wider.
    rounded_to = tf.as_dtype(self._config.activation_dtype)
    dtype = rounded_to if self._is_packed else logits_dtype(self._config)

    def pack_kernel(x, name):
      panels = pack(
        [x],
        tf.int8 if is_quantized else dtype,
        is_transposed=True,
        is_rounded=rounded_to == tf.bfloat16,
      )
      return make_packed_kernel(panels, name)

    def keep_plain(x, name):
      w = tf.cast(tf.transpose(x), rounded_to)
      if is_quantized:
        w = tf.cast(w, tf.float32)
        w = round_to_int8(w, find_largest(w))
      return make_kernel(w, dtype, name)

    make = pack_kernel if self._is_packed else keep_plain
    table = self._read(logits_table(self._config))
    return self._make_kernel("to_logits", make, table)

  def make_joined_kernels(
    self, layer: int
  ) -> Iterator[tuple[tuple[str, ...], LaidOut]]:
    """Yields (names of kernels, the kernel that joins them) for a layer."""
    for names, summed in self.find_joins(layer):
      rounds = self._dtype == tf.int8 and not self._is_packed
      largest = [self._find_largest(summed)] if summed and rounds else []
      yield names, self._join(names, *largest)

  def find_joins(
    self, layer: int
  ) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yields (parts, summed) for each joined kernel of a layer.

    parts: names of the kernels that are joined into one matrix.
    summed: names of the output kernels (attention's and the MLP's) whose
      products are added up and which, therefore, share int8 scales; () if
      `parts` are input kernels, such as q.
    """
    for each in model_of(self._config).layers[layer].sums:
      *reads, outputs = (
        tuple(f"{layer_name(layer)}/{part}" for part in parts)
        for parts in (*(read.parts for read in each.reads), each.outputs)
      )
      for names in reads:
        yield names, ()
      # Join output kernels only if they are packed: a packed product can read
      # inputs from several tensors. For an unpacked kernel, a step would have
      # to join the inputs too, which costs more than a second product.
      joins = self._is_packed
      for names in [outputs] if joins else [(name,) for name in outputs]:
        yield names, outputs

  def make_layers(
    self, slices: Mapping[str, Sequence[Slice]]
  ) -> list[LayerWeights]:
    """Returns each layer's `LayerWeights`; call this after making kernels."""
    by_layer = collections.defaultdict(dict)
    for name, parts in slices.items():
      by_layer[parse_name(name).layer][name] = parts
    layers = []
    for layer, some in by_layer.items():
      with tf.control_dependencies(self._initializers[layer]):
        free = [
          tf.raw_ops.DestroyResourceOp(resource=each.variable.handle)
          for parts in some.values()
          for each in parts
        ]
      layers.append(LayerWeights(some, tf.group(free)))
    return layers

  def _join(self, names, *largest):
    axis = self._find_axis(names[0])

    def pack_kernel(*parts, name):
      panels = pack(parts, self._dtype, joins_rows=axis == 0)
      return make_packed_kernel(panels, name)

    def keep_plain(*parts, name):
      parts, largest = parts[: len(names)], parts[len(names) :]
      whole = tf.concat(parts, axis)
      # Round the weights as for int8 or int4, but keep a float dtype, because
      # TensorFlow multiplies by float weights.
      if self._dtype == INT4:
        whole = round_to_int4(whole)
      elif self._dtype == tf.int8:
        whole = round_to_int8(whole, *(largest or [find_largest(whole)]))
      return make_kernel(whole, self._config.activation_dtype, name)

    make = pack_kernel if self._is_packed else keep_plain
    matrices = [self._make_matrix(name) for name in names]
    return self._make_kernel(names[0], make, *matrices, *largest)

  def _find_axis(self, name):
    # Returns the axis of a kernel's matrix that is not d_model: 1 for q,
    # [d_model, heads * d_kv], and 0 for o, [heads * d_kv, d_model].
    return int(self._dims[name][0].name == "d_model")

  def _make_matrix(self, name):
    axis = self._find_axis(name)

    def flatten(x):
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
