# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights for decoding, and products with them, on every device of a mesh."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.block import (
  NORMS,
  Attention,
)
from palm_mtf.architecture.parameters import (
  layer_name,
)
from palm_mtf.config import MeshLayout, ModelConfig
from palm_mtf.generation.decode.kernels import (
  multiply,
)
from palm_mtf.generation.decode.rows import LaidOut
from palm_mtf.mesh.cpu_gpu import CpuGpuPlacement
from palm_mtf.mesh.slices import Slice
from palm_mtf.model.dims import Dims
from palm_mtf.model.layers import local_embedding
from palm_mtf.model.positions import alibi_slopes
from palm_mtf.ops.slicewise import slice_offset, split_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSettings:
  """All that decoding weights depend on.

  Attributes:
    model: architecture.
    mesh_layout: axes and layout rules, checked against `model`.
    weight_dtype: WEIGHT_DTYPE.
  """

  model: ModelConfig
  mesh_layout: MeshLayout
  weight_dtype: str


@dataclasses.dataclass(frozen=True)
class JoinedKernel:
  """Several kernels of a layer (the parts), concatenated into one matrix."""

  kernel: LaidOut  # a `Kernel` for each device's slice of the matrix
  dims: list[list[mtf.Dimension]]  # dimensions of each part, without d_model


@dataclasses.dataclass(frozen=True)
class LayerWeights:
  """Slices of a layer's parameters, and the operation that converts the slices.

  `load_weights` (generation/inference/sessions.py) assigns the slices, then
  runs `prepare`. One more `LayerWeights` has the weights outside of the layers.
  """

  # {name of a checkpoint variable: its slices}.
  slices: Mapping[str, Sequence[Slice]]
  # Operation that makes decoding weights, and then frees the slices.
  prepare: tf.Operation


@dataclasses.dataclass(frozen=True)
class DecodeModel:
  """Weights of one model on one mesh.

  `LoadedDecoder`, in generation/inference/sessions.py, loads the weights.
  """

  placement: CpuGpuPlacement  # devices and layout
  config: ModelConfig
  dims: Dims  # `build_palm` (forward.py) replaces `batch` and `length`
  table: LaidOut  # embedding, [vocab, d_model], activation dtype
  # The transposed table of the logits: a `Kernel` for each device's slice.
  to_logits: LaidOut
  # {name: scale, bias or table of positions}. Scales and biases are float32,
  # tables have the activation dtype (see `WeightMaker.make_vectors`).
  vectors: dict[str, LaidOut]
  kernels: dict[tuple[str, ...], JoinedKernel]  # keys: names of the parts
  is_packed: bool  # whether kernels are packed for `native`'s C++ operations
  layers: Sequence[LayerWeights] = ()

  # Whether a cache has only two tensors: the keys of all layers, and the values
  # of all layers, each [layers, ...].
  has_stacks = False

  @property
  def row_axis(self) -> int:
    """The dimension of a cache's tensors that counts the rows."""
    return int(self.has_stacks)

  def embed(self, tokens: LaidOut) -> LaidOut:
    """Returns each token's row of the embedding, [rows, d_model]."""
    x = self.placement.slicewise(
      local_embedding,
      slice_offset(self.placement, self.dims.vocab),
      self.table,
      tokens,
    )
    # If a layout splits vocab, all-reduce [rows, d_model]: one slice of the
    # table gives a token's row, and the other slices give zeros.
    axes = split_axes(self.placement, [self.dims.vocab])
    x, scale = (
      self.placement.allreduce(x, axes, "SUM"),
      self.config.embedding_scale,
    )
    return x if scale == 1 else self.placement.slicewise(lambda x: x * scale, x)

  def norm_vectors(self, name: str) -> list[LaidOut]:
    """Returns the scale, and bias if any, of a norm, [d_model] float32 each."""
    names = [f"{name}/scale", f"{name}/bias"]
    return [self.vectors[x] for x in names if x in self.vectors]

  def score_extras(self, layer: str, mixer: Attention) -> list[LaidOut]:
    """Returns the `extras` of `score_by_distance`, for all distances."""
    if mixer.score_positions == "alibi":
      slopes = tf.constant(alibi_slopes(self.config.num_heads))
      slices = self.placement.make_slices(slopes, mtf.Shape([self.dims.heads]))
      return [self.placement.LaidOutTensor(slices)]
    return [self.vectors[f"{layer}/{name}"] for name, _ in mixer.extras]

  def multiply(
    self, xs: Sequence[LaidOut], kernel: LaidOut, *, is_step: bool
  ) -> LaidOut:
    """Multiplies rows by a kernel on each device; returns [rows, outer].

    See `kernels.multiply` for the arguments; the result has the dtype of `xs`.
    """
    return self.placement.slicewise(
      lambda kernel, *xs: multiply(xs, kernel, is_step=is_step), kernel, *xs
    )

  def for_each_layer(
    self,
    run: Callable[["DecodeModel", "int | tf.Tensor", list[LaidOut]], list],
    carry: list[LaidOut],
  ) -> list[LaidOut]:
    """Runs a function for each layer, from the first to the last.

    Args:
      run: takes a model with only one layer, whose weights have the names of
        the first layer; the layer's number, int or [] int32; and a list:
        `carry` for the first layer, then the result of `run` for the previous
        layer.
      carry: see `run`.

    Returns:
      What `run` returns for the last layer.
    """
    for i in range(self.config.num_layers):
      carry = run(self._take_layer(i), i, carry)
    return carry

  def _take_layer(self, layer: int) -> "DecodeModel":
    own, first = layer_name(layer), layer_name(0)

    def rename(name: str) -> str:
      return name.replace(own, first, 1)

    return dataclasses.replace(
      self,
      config=dataclasses.replace(self.config, num_layers=1),
      vectors={
        rename(name): x
        for name, x in self.vectors.items()
        if name.startswith(own)
      },
      kernels={
        tuple(map(rename, names)): x
        for names, x in self.kernels.items()
        if names[0].startswith(own)
      },
    )

  def make_last_norm(self) -> list[LaidOut]:
    """Returns the last norm's scale and bias times the factor of the logits."""
    # The factor scales the logits, as in model/palm.py.
    return [
      self.placement.slicewise(lambda x: x * self.config.logits_factor, x)
      for x in self.add_scale_offset(self.norm_vectors("final_norm"))
    ]

  def add_scale_offset(self, vectors: list[LaidOut]) -> list[LaidOut]:
    """Adds the offset of NORM to the scale, the first of a norm's vectors."""
    offset = NORMS[self.config.norm].scale_offset
    if not offset:
      return vectors
    scale, *bias = vectors
    return [self.placement.slicewise(lambda x: x + offset, scale), *bias]
