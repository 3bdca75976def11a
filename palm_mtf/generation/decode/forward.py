# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Forward pass of model/palm.py with decoding weights, and the prefill."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.adapter import PROMPT
from palm_mtf.architecture.block import (
  Attention,
  Branch,
  Projection,
  Read,
  model_of,
)
from palm_mtf.errors import UserError
from palm_mtf.generation.decode.kernels import can_be_unpacked
from palm_mtf.generation.decode.rows import Cache, repeat, split_rows, write_row
from palm_mtf.generation.decode.weights import DecodeModel
from palm_mtf.model.layers import embed
from palm_mtf.model.palm import KeysAndValues, Palm
from palm_mtf.model.positions import add_positions
from palm_mtf.model.projection import result_indices
from palm_mtf.model.virtual import put_virtual
from palm_mtf.model.weights import logits_dtype
from palm_mtf.native import layers as native
from palm_mtf.native.decoding import PackedKernel
from palm_mtf.ops.placement import LaidOut
from palm_mtf.ops.slicewise import native_threads

# Each forward pass is a separate mtf.Graph, lowered into the current tf.Graph.
# Kernels enter the mtf.Graph as slices on devices. Keys and values leave the
# mtf.Graph as slices. Therefore no tensor is copied or gathered.

# The cache has a multiple of this number of positions, because positions that
# fill whole vector registers are read twice as fast.
_ALIGNMENT = 64


class _OnSlices(mtf.Operation):
  """Wraps a function of slices (a DecodeModel's method) in an mtf operation."""

  def __init__(
    self,
    fn: Callable[..., Sequence[LaidOut]],
    inputs: Sequence[mtf.Tensor],
    shapes: Sequence[mtf.Shape] = (),
    dtype: tf.DType | None = None,
  ):
    # Outputs have `shapes`. If `dtype` is None, it is the first input's dtype.
    super().__init__(list(inputs), name="on_slices")
    self._fn = fn
    dtype = dtype or inputs[0].dtype
    self._outputs = [mtf.Tensor(self, shape, dtype) for shape in shapes]

  def lower(self, lowering: mtf.Lowering) -> None:
    inputs = [lowering.tensors[x].to_laid_out_tensor() for x in self.inputs]
    for output, value in zip(self.outputs, self._fn(*inputs), strict=True):
      lowering.set_tensor_lowering(output, value)


class JoinedWeights:
  """Lets the forward pass of model/palm.py read the weights of a DecodeModel.

  The methods are those of TrainedWeights (model/weights.py). In a DecodeModel,
  kernels that read the same input, such as q, k and v, are one joined matrix.
  """

  def __init__(self, mesh: mtf.Mesh, model: DecodeModel):
    self.mesh = mesh
    self._impl, self._dims = model.placement, model.dims
    self._model = model

  def _import(self, x: LaidOut, *dims: mtf.Dimension) -> mtf.Tensor:
    return mtf.import_laid_out_tensor(self.mesh, x, mtf.Shape(dims))

  def embed(
    self, tokens: mtf.Tensor, segments: mtf.Tensor | None
  ) -> mtf.Tensor:
    """Returns the input of the first block, [batch, length, d_model]."""
    dims, config = self._dims, self._model.config
    table = self._import(self._model.take("table"), dims.vocab, dims.d_model)
    x = embed(table, tokens, scale=config.embedding_scale)
    if config.adapter == "prompt":
      given = self.virtual(PROMPT, ("virtual", "d_model")), segments
      x = put_virtual(x, *given)
    positions = self._model.weights.get("position_embedding")
    if positions is None:
      return x
    table = self._import(positions, dims.positions, dims.d_model)
    return add_positions(x, table, segments)

  def virtual(self, name: str, dims: tuple[str, ...]) -> mtf.Tensor:
    """Returns what an adapter has of its virtual positions."""
    return self._import(self._model.take(name), *self._model.dims_of(dims))

  def norm_vectors(self, name: str, after: mtf.Tensor) -> list[mtf.Tensor]:
    """Returns the scale, and the bias if any, of a norm, [d_model] each."""
    del after  # no all-gather to delay: devices hold whole vectors here
    vectors, names = self._model.weights, [f"{name}/scale", f"{name}/bias"]
    return [
      self._import(vectors[x], self._dims.d_model)
      for x in names
      if x in vectors
    ]

  def score_extras(
    self, layer: str, mixer: Attention, length: mtf.Dimension
  ) -> list[mtf.Tensor]:
    """Returns ALiBi's slopes, or T5's or Transformer-XL's score parameters."""
    del length
    found = self._model.score_extras(layer, mixer)
    if mixer.score_positions == "alibi":
      return [self._import(x, self._dims.heads) for x in found]
    # Transformer-XL's kernel [d_model, ...] is replaced by its products, a
    # vector per distance, [positions, ...] (WeightMaker.make).
    renamed = {"d_model": "positions"}
    return [
      self._import(x, *(getattr(self._dims, renamed.get(y, y)) for y in dims))
      for x, (_, dims) in zip(found, mixer.extras, strict=True)
    ]

  def project_in(
    self, x: mtf.Tensor, layer: str, read: Read, angles: Sequence[mtf.Tensor]
  ) -> list[mtf.Tensor]:
    """Returns q, k and v, the MLP's hidden layer or both, as `read` lists."""
    columns = self._model.columns(read, native_threads(self._impl))
    vectors = self._model.project_vectors(layer, read)
    batch, length, _ = x.shape.dims
    outputs = {}  # {index: shape}; two products of a gated MLP give one output
    for index, each in zip(result_indices(read), read.projections, strict=True):
      positions = mtf.Dimension(each.positions, length.size)
      dims = [batch, positions, *self._model.dims_of(each.outputs)]
      outputs[index] = mtf.Shape(dims)

    def project(y: LaidOut, *angles: LaidOut) -> Sequence[LaidOut]:
      rows, n = y.slice_shape[:2], len(angles)  # rows: [batch, length]
      flat = self._impl.slicewise(lambda y: tf.reshape(y, [-1, y.shape[-1]]), y)

      def split(wide, *others):
        return tuple(columns.split(wide, rows, others[:n], others[n:]))

      wide = self._model.project_in(flat, layer, read, is_step=False)
      found = self._impl.slicewise(split, wide, *angles, *vectors)
      return found if isinstance(found, tuple) else [found]

    return _OnSlices(project, [x, *angles], list(outputs.values())).outputs

  def run_experts(
    self, x: mtf.Tensor, layer: str, branch: Branch
  ) -> mtf.Tensor:
    """Returns the sum of the results of each token's experts, shaped as x."""

    def run(x: LaidOut) -> list[LaidOut]:
      return [self._model.run_experts(x, layer, branch)]

    return _OnSlices(run, [x], [x.shape]).outputs[0]

  def project_out(
    self,
    layer: str,
    branches: Mapping[Projection, mtf.Tensor],
    others: Sequence[mtf.Tensor] = (),
  ) -> mtf.Tensor:
    """Returns the sum of output projections and of `others`.

    `branches` has the projections' inputs.
    """

    def project(*xs: LaidOut) -> LaidOut:
      given = dict(zip(branches, xs, strict=False))
      rest = xs[len(given) :]
      return self._model.project_out(layer, given, rest, is_step=False)

    xs = [*branches.values(), *others]
    return self._apply_to_rows(project, xs, self._dims.d_model)

  def output_biases(
    self, layer: str, outputs: Iterable[Projection], after: mtf.Tensor
  ) -> list[mtf.Tensor]:
    """Returns the biases of `outputs`, [d_model] each."""
    del after  # no all-gather to delay: devices hold whole vectors here
    return [
      self._import(x, self._dims.d_model)
      for x in self._model.output_biases(layer, outputs)
    ]

  def unembed(self, x: mtf.Tensor) -> mtf.Tensor:
    """Returns logits, [batch, length, vocab]: x times the transposed table."""
    unembed = functools.partial(self._model.unembed, is_step=False)
    dtype = logits_dtype(self._model.config)
    return self._apply_to_rows(unembed, [x], self._dims.vocab, dtype)

  def _apply_to_rows(
    self,
    fn: Callable[..., LaidOut],
    xs: list[mtf.Tensor],
    output: mtf.Dimension,
    dtype: tf.DType | None = None,
  ) -> mtf.Tensor:
    # Returns fn(*xs), [batch, length, output]. xs are [batch, length, inputs]
    # each; fn takes their slices as [batch * length, inputs]. If `dtype` is
    # None, the result has the dtype of xs.
    def apply(*xs: LaidOut) -> list[LaidOut]:
      batch, length = xs[0].slice_shape[:2]

      def flatten(x):
        return tf.reshape(x, [batch * length, -1])

      rows = fn(*(self._impl.slicewise(flatten, x) for x in xs))
      return [
        self._impl.slicewise(lambda y: tf.reshape(y, [batch, length, -1]), rows)
      ]

    shape = mtf.Shape([*xs[0].shape.dims[:2], output])
    return _OnSlices(apply, xs, [shape], dtype).outputs[0]


def build_palm(
  model: DecodeModel,
  num_rows: int,
  length: int,
  neighbours: tf.Tensor | None = None,
  **settings: Any,
) -> tuple[mtf.Mesh, mtf.Shape, Palm]:
  """Returns a new mesh, the shape of token ids on the mesh, and the model.

  Args:
    num_rows: divisible by the size of the mesh axis that splits `batch`.
    length: sequence length, at most the model's sequence_length.
    neighbours: the tokens of the rows' neighbours, if layers attend to any.
    **settings: further arguments of Palm.
  """
  mesh = mtf.Mesh(mtf.Graph(), "pod")
  dims = dataclasses.replace(
    model.dims,
    batch=mtf.Dimension("batch", num_rows),
    length=mtf.Dimension("length", length),
    memory_length=mtf.Dimension("memory_length", length),
  )
  # REMAT recomputes activations only for a backward pass, which is absent here.
  config = dataclasses.replace(model.config, remat="none")
  tokens = None
  if neighbours is not None:
    if model.has_stacks:
      raise UserError(
        "NEIGHBOURS: accelerators train and evaluate with neighbours, but only "
        'CPUs score texts with them; set TPU = "" on a CPU.'
      )
    own = mtf.Dimension("length", neighbours.shape[1])
    shape = mtf.Shape([dims.batch, own])
    tokens = import_rows(model, mesh, neighbours, shape)
  weights = JoinedWeights(mesh, model)
  palm = Palm(config, dims, weights, neighbours=tokens, **settings)
  return mesh, mtf.Shape([dims.batch, dims.length]), palm


def import_rows(
  model: DecodeModel, mesh: mtf.Mesh, x: tf.Tensor, shape: mtf.Shape
) -> mtf.Tensor:
  """Brings x, [batch, length], onto a mesh that `build_palm` made."""
  return mtf.import_laid_out_tensor(mesh, split_rows(model.placement, x), shape)


def make_masks(
  model: DecodeModel, mesh: mtf.Mesh, num_given: LaidOut, shape: mtf.Shape
) -> list[mtf.Tensor]:
  """Returns the segment ids and the prefix of rows, [batch, length] int32 each.

  Each row is one document, segment 0. The prefix is 1 for the first `num_given`
  tokens of a row ([batch] int32), which attend in both directions, else 0. If
  OBJECTIVE is "causal", rows have no prefix, and the result is [].
  """
  if not model.config.has_prefix:
    return []
  length = shape.dims[1].size
  prefix = model.placement.slicewise(
    lambda n: tf.sequence_mask(n, length, tf.int32), num_given
  )
  prefix = mtf.import_laid_out_tensor(mesh, prefix, shape)
  return [mtf.zeros_like(prefix), prefix]


def take_slices(
  model: DecodeModel, mesh: mtf.Mesh, tensors: Sequence[mtf.Tensor]
) -> list[LaidOut]:
  """Lowers the graph of `mesh`; returns the devices' slices of `tensors`."""
  # Take the slices in an mtf.Operation, because Mesh TensorFlow's export would
  # gather whole tensors.
  taken: list[LaidOut] = []
  _OnSlices(lambda *xs: taken.extend(xs) or [], tensors)
  model.placement.lower({mesh: model.placement})
  return taken


def run_blocks(
  model: DecodeModel,
  palm: Palm,
  x: mtf.Tensor,
  masks: Sequence[mtf.Tensor],
  keys_and_values: KeysAndValues | None = None,
) -> mtf.Tensor:
  """Runs the blocks of all layers; returns the last block's output, like x.

  Args:
    palm: the model that `build_palm` returned.
    x: [batch, length, d_model]: input of the first block.
    masks: segment ids and prefix, from `make_masks`.
    keys_and_values: None, or a list to which (keys, values) are appended: one
      pair per layer, [batch, memory_length, ...] each; or on accelerators
      (`has_stacks`) one pair, [layers, batch, memory_length, ...] each.
  """
  config, impl = model.config, model.placement
  if not model.has_stacks:
    layers = range(config.num_layers)
    return palm.run_blocks(x, layers, *masks, keys_and_values=keys_and_values)
  given = [x, *masks]
  batch, length, _ = x.shape.dims
  layers = mtf.Dimension("layers", config.num_layers)
  memory_length = mtf.Dimension("memory_length", length.size)
  stack = mtf.Shape([layers, batch, memory_length, *key_dims(model)])
  num_stacks = 0 if keys_and_values is None else 2

  def run_layer(
    model: DecodeModel, like: int, layer: tf.Tensor, carry: list[LaidOut]
  ) -> list[LaidOut]:
    values, stacks = carry[:1] + laid_out_masks, carry[1:]
    mesh, _, palm = build_palm(model, batch.size, length.size)
    x, *masks = (
      mtf.import_laid_out_tensor(mesh, value, each.shape)
      for value, each in zip(values, given, strict=True)
    )
    kept: KeysAndValues = []
    y = palm.run_blocks(x, [like], *masks, keys_and_values=kept)
    y, *kept = take_slices(model, mesh, [y, *kept[0]])

    def write(stack, x):
      return write_row(stack, layer, x[tf.newaxis], 0)

    pairs = zip(stacks, kept, strict=False)  # `stacks` may be []
    return [y, *(impl.slicewise(write, *pair) for pair in pairs)]

  laid_out_masks: list[LaidOut] = []

  def run(x: LaidOut, *masks: LaidOut) -> list[LaidOut]:
    laid_out_masks.extend(masks)
    zeros = [
      impl.slicewise(lambda x: tf.zeros(impl.slice_shape(stack), x.dtype), x)
      for _ in range(num_stacks)
    ]
    return model.for_each_layer(run_layer, [x, *zeros])

  # This operation is a loop over like layers, whose body lowers a mesh graph of
  # one block, so that XLA compiles the block once, not once per layer.
  y, *stacks = _OnSlices(run, given, [x.shape, *[stack] * num_stacks]).outputs
  if keys_and_values is not None:
    keys_and_values.append(tuple(stacks))
  return y


def key_dims(model: DecodeModel) -> list[mtf.Dimension]:
  """Returns the dimensions of a key: key heads, if there are any, and d_kv."""
  _, k, _ = model_of(model.config).layers[0].attention.inputs
  return model.dims_of(k.outputs)


def prefill(
  model: DecodeModel,
  prompts: tf.Tensor,
  lengths: LaidOut,
  num_positions: int,
  rows_per_prompt: int = 1,
) -> Cache:
  """Returns the keys and values of prompts, from one forward pass.

  The forward pass computes no logits, so the first decoding step has to read
  the last token of each prompt again.

  Args:
    prompts: [batch, length], int32, left-aligned.
    lengths: [batch], int32: number of tokens per prompt.
    num_positions: minimum number of positions in the cache; at least `length`.
    rows_per_prompt: number of adjacent rows that get a copy of the prompt.

  Returns:
    The cache (rows.py), a list of tensors in the activation dtype, each [rows,
    positions, d_kv] or, with several key heads, [rows, key_heads, positions,
    d_kv]. On accelerators (`has_stacks`), `layers` is the first dimension.
    `positions` is `num_positions`, rounded up to a multiple of _ALIGNMENT.
  """
  impl, (num_rows, length) = model.placement, prompts.shape
  memory_length = -(-num_positions // _ALIGNMENT) * _ALIGNMENT
  mesh, shape, palm = build_palm(model, num_rows, length)
  masks = make_masks(model, mesh, lengths, shape)
  x = palm.embed(import_rows(model, mesh, prompts, shape))
  keys_and_values: KeysAndValues = []
  run_blocks(model, palm, x, masks, keys_and_values)
  found = take_slices(model, mesh, [*itertools.chain(*keys_and_values)])

  # The padding after a prompt gets keys and values too. No token attends to the
  # padding, because later steps first overwrite its keys and values.
  def store(x):
    # x is [batch, length, d_kv] or [batch, length, key_heads, d_kv]; on
    # accelerators, with the dimension `layers` first.
    *before, length_at, heads_at, last = range(x.shape.rank)
    if len(key_dims(model)) > 1:
      x = tf.transpose(x, [*before, heads_at, length_at, last])
    before = [[0, 0]] * (x.shape.rank - 2)
    x = tf.pad(x, [*before, [0, memory_length - length], [0, 0]])
    return repeat(x, rows_per_prompt, model.row_axis)

  return [impl.slicewise(store, x) for x in found]


def reads_parts(model: DecodeModel) -> bool:
  """Returns whether `read_parts` can read prompts of this model."""
  config = model.config
  mixers = [x.attention.mixer for x in model_of(config).layers]
  is_causal = not (config.has_prefix or config.adapter_length)
  # Only steps in C++ leave out rows whose prompts are not read whole.
  if not (model.is_native and is_causal and all(map(native.attends, mixers))):
    return False
  # Parts are cut as the server's load allows, which may change no bit.
  dtype = tf.as_dtype(config.activation_dtype)
  return not any(
    isinstance(x, PackedKernel) and can_be_unpacked(x, dtype)
    for name, weights in model.weights.items()
    for x in (weights.tensor_list if name != "to_logits" else ())
  )


def read_parts(
  model: DecodeModel, parts: Sequence[tf.Tensor], count: tf.Tensor, cache: Cache
) -> Cache:
  """Reads parts of prompts; returns the cache with their keys and values.

  They have the bits that `prefill` gives them, because each number of a token
  is computed in an order that does not depend on other tokens.

  Args:
    parts: tokens, their rows in the cache and their positions, [tokens] int32
      each. Tokens of a row are next to one another, in the order of their
      positions; the cache has all tokens before the first.
    count: how many tokens count, [] int32.
    cache: written in place.
  """
  impl, (tokens, rows, positions) = model.placement, parts
  threads, after = native_threads(impl), list[LaidOut]()

  def attend(q: mtf.Tensor, *others: mtf.Tensor, **unused: Any) -> mtf.Tensor:
    def run(*qkv: LaidOut) -> list[LaidOut]:
      given = *qkv, *cache[len(after) :][:2]
      out, *written = impl.slicewise(
        lambda *x: native.attend_to_cache(
          *(x[:3], rows, positions, count, x[3:]), threads=threads
        ),
        *given,
      )
      after.extend(written)
      return [out]

    return _OnSlices(run, [q, *others[:2]], [q.shape]).outputs[0]

  mesh, shape, palm = build_palm(
    model, 1, tokens.shape[0], attention=attend, positions=positions
  )
  x = palm.embed(import_rows(model, mesh, tokens[tf.newaxis], shape))
  run_blocks(model, palm, x, [])
  impl.lower({mesh: impl})
  return after
