# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Forward pass of model/palm.py with decoding weights: prefill and scoring."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.generation.decode.rows import Cache, LaidOut
from palm_mtf.generation.decode.weights import DecodeModel, Products
from palm_mtf.model.layers import embed
from palm_mtf.model.loss import cross_entropy
from palm_mtf.model.palm import KeysAndValues, Palm
from palm_mtf.model.projection import JoinedColumns
from palm_mtf.model.weights import GATES, logits_dtype, positions_of
from palm_mtf.ops.slicewise import native_threads
from palm_mtf.runtime.program import Program

# Each forward pass is a separate Mesh TensorFlow graph, lowered into the
# program's TensorFlow graph. Kernels enter the mesh graph, and keys and values
# leave it, as slices on the devices, so that nothing is copied or gathered.

# The cache has a multiple of this number of positions, because positions that
# fill whole vector registers are read twice as fast.
_ALIGNMENT = 64


class _OnSlices(mtf.Operation):
  """Applies a function to laid-out tensors, which have a slice per device."""

  def __init__(
    self,
    fn: Callable[..., Sequence[LaidOut]],
    inputs: Sequence[mtf.Tensor],
    shapes: Sequence[mtf.Shape] = (),
    dtype: tf.DType | None = None,
  ):
    # `shapes` and `dtype` are those of the outputs. If `dtype` is None, outputs
    # have the dtype of the first input.
    super().__init__(list(inputs), name="on_slices")
    self._fn = fn
    dtype = dtype or inputs[0].dtype
    self._outputs = [mtf.Tensor(self, shape, dtype) for shape in shapes]

  def lower(self, lowering: mtf.Lowering) -> None:
    inputs = [lowering.tensors[x].to_laid_out_tensor() for x in self.inputs]
    for output, value in zip(self.outputs, self._fn(*inputs), strict=True):
      lowering.set_tensor_lowering(output, value)


class JoinedWeights:
  """Decoding weights with the interface of `model.weights.Weights`."""

  def __init__(self, mesh: mtf.Mesh, model: DecodeModel):
    self.mesh = mesh
    self._impl, self._dims = model.placement, model.dims
    self._model = model
    # A forward pass has many rows, so oneDNN's packed copies of the kernels
    # would save no time, but take memory.
    self._products = Products(model, packed=False)
    self._dtype = tf.as_dtype(model.config.activation_dtype)

  def _import(self, x: LaidOut, *dims: mtf.Dimension) -> mtf.Tensor:
    return mtf.import_laid_out_tensor(self.mesh, x, mtf.Shape(dims))

  def embed(self, tokens: mtf.Tensor) -> mtf.Tensor:
    """Returns each token's row of the embedding; see `Weights`."""
    dims = self._dims
    table = self._import(self._model.table, dims.vocab, dims.d_model)
    return embed(table, tokens)

  def scale(self, name: str, after: mtf.Tensor) -> mtf.Tensor:
    """Returns the scale of a norm; see `Weights`."""
    del after  # no gather waits, because every device has the whole scale
    scale = self._model.scales[f"{name}/scale"]
    return self._import(scale, self._dims.d_model)

  def project_in(
    self,
    x: mtf.Tensor,
    layer: str,
    parts: Sequence[str],
    angles: Sequence[mtf.Tensor] = (),
  ) -> list[mtf.Tensor]:
    """Multiplies x by the joined kernel of `parts`; see `Weights`."""
    names = tuple(f"{layer}/{part}" for part in parts)
    shapes = self._products.shapes(names)
    is_gated = parts[-1] == GATES[-1]
    columns = JoinedColumns(shapes, is_gated, native_threads(self._impl))

    def project(y: LaidOut, *angles: LaidOut) -> Sequence[LaidOut]:
      rows = y.slice_shape[:2]  # [batch, length]
      flat = self._impl.slicewise(lambda y: tf.reshape(y, [-1, y.shape[-1]]), y)
      return self._impl.slicewise(
        lambda wide, *angles: columns.read(wide, rows, angles),
        self._products.project_in(flat, names),
        *angles,
      )

    dims = self._model.kernels[names].dims
    outputs = [
      mtf.Shape([x.shape.dims[0], position, *each])
      for position, each in zip(
        positions_of(parts, x.shape.dims[1]), dims, strict=True
      )
    ]
    return _OnSlices(
      project, [x, *angles], outputs[: -1 if is_gated else None]
    ).outputs

  def project_out(self, branches: Mapping[str, mtf.Tensor]) -> mtf.Tensor:
    """Multiplies each branch by its kernel; returns the sum; see `Weights`."""

    def project(*xs: LaidOut) -> LaidOut:
      return self._products.project_out(dict(zip(branches, xs, strict=True)))

    return self._apply_to_rows(
      project, list(branches.values()), self._dims.d_model, self._dtype
    )

  def unembed(self, x: mtf.Tensor) -> mtf.Tensor:
    """Multiplies x by the transposed embedding; see `Weights`."""
    return self._apply_to_rows(
      self._products.unembed,
      [x],
      self._dims.vocab,
      logits_dtype(self._model.config),
    )

  def _apply_to_rows(
    self,
    fn: Callable[..., LaidOut],
    xs: list[mtf.Tensor],
    output: mtf.Dimension,
    dtype: tf.DType,
  ) -> mtf.Tensor:
    # `fn` maps [batch * length, inputs] to [batch * length, output].
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
  model: DecodeModel, num_rows: int, length: int
) -> tuple[mtf.Mesh, mtf.Shape, Palm]:
  """Returns a new mesh, the shape of token ids on the mesh, and the model.

  Args:
    num_rows: divisible by the size of the mesh axis that splits `batch`.
    length: sequence length, at most the model's sequence_length.
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
  palm = Palm(config, dims, JoinedWeights(mesh, model))
  return mesh, mtf.Shape([dims.batch, dims.length]), palm


def make_prefix_masks(prefix: mtf.Tensor) -> tuple[mtf.Tensor, mtf.Tensor]:
  """Returns the arguments `segments` and `prefix` of `Palm.logits`.

  `prefix`, [batch, length] int32, is 1 for inputs, which attend to one another
  in both directions, otherwise 0. Each row is one document.
  """
  return mtf.zeros_like(prefix), prefix


def prefill(
  model: DecodeModel,
  prompts: tf.Tensor,
  lengths: LaidOut,
  num_positions: int,
) -> Cache:
  """Returns the keys and values of prompts, from one forward pass.

  The pass computes no logits, so the first decoding step has to read the last
  token of each prompt again.

  Args:
    prompts: [batch, length], int32, left-aligned.
    lengths: [batch], int32: number of tokens per prompt.
    num_positions: minimum number of positions in the cache; at least `length`.
  """
  impl, (num_rows, length) = model.placement, prompts.shape
  memory_length = -(-num_positions // _ALIGNMENT) * _ALIGNMENT
  mesh, shape, palm = build_palm(model, num_rows, length)
  masks = [None, None]
  if model.config.has_prefix:  # prompt tokens attend in both directions
    prefix = impl.slicewise(
      lambda n: tf.sequence_mask(n, length, tf.int32), lengths
    )
    masks = make_prefix_masks(mtf.import_laid_out_tensor(mesh, prefix, shape))
  keys_and_values: KeysAndValues = []
  palm.hidden(
    mtf.import_tf_tensor(mesh, prompts, shape), *masks, keys_and_values
  )
  # Take the slices in an mtf.Operation, because Mesh TensorFlow's export would
  # gather whole tensors.
  laid_out: list[LaidOut] = []
  _OnSlices(
    lambda *xs: laid_out.extend(xs) or [], [*itertools.chain(*keys_and_values)]
  )
  impl.lower({mesh: impl})

  # The padding after a prompt gets keys and values too, but no token attends to
  # these before a later step overwrites them.
  def store(x):
    if x.shape.rank == 4:  # multi-head: x is [batch, length, heads, d_kv]
      x = tf.transpose(x, [0, 2, 1, 3])
    before = [[0, 0]] * (x.shape.rank - 2)
    return tf.pad(x, [*before, [0, memory_length - length], [0, 0]])

  return [impl.slicewise(store, x) for x in laid_out]


NUM_LIKELIEST = 5  # number of likeliest tokens to return per position


def build_score_program(
  model: DecodeModel, num_rows: int, length: int
) -> Program:
  """Builds the program that scores rows of one length, in the current tf.Graph.

  `forward.build_palm` documents the arguments.

  Inputs:
    inputs: [rows, length], int32: the token before each target.
    targets: [rows, length], int32: tokens to score.
    num_given: [rows], int32: the first `num_given` inputs attend to one another
      in both directions. Ignored if OBJECTIVE is "causal".

  Outputs:
    token_loss: [rows, length], float32: -log p of each target.
    is_likeliest: [rows, length], bool: whether no token is likelier than the
      target.
    likeliest: [rows, length, k], int32: the k likeliest tokens that could stand
      in place of each target, likeliest first.
    likeliest_loss: [rows, length, k], float32: -log p of `likeliest`.
  """
  inputs, targets = (
    tf.placeholder(tf.int32, [num_rows, length], name)
    for name in ("inputs", "targets")
  )
  num_given = tf.placeholder(tf.int32, [num_rows], "num_given")
  # Scoring uses decoding's weights, so that a process that scores and continues
  # texts holds only one copy of the weights.
  mesh, shape, palm = build_palm(model, num_rows, length)
  masks = [None, None]
  if model.config.has_prefix:
    prefix = tf.sequence_mask(num_given, length, tf.int32)
    masks = make_prefix_masks(mtf.import_tf_tensor(mesh, prefix, shape))
  logits = palm.logits(mtf.import_tf_tensor(mesh, inputs, shape), *masks)
  wanted = mtf.import_tf_tensor(mesh, targets, shape)
  token_loss, log_z = cross_entropy(logits, wanted)
  # Summing `logits * is_target` over the vocabulary gives the target's logit.
  vocab = logits.shape.dims[-1]
  is_target = mtf.one_hot(wanted, vocab, dtype=logits.dtype)
  is_likeliest = mtf.greater_equal(
    mtf.reduce_sum(logits * is_target, reduced_dim=vocab),
    mtf.reduce_max(logits, reduced_dim=vocab),
  )
  exported = {
    "token_loss": token_loss,
    "is_likeliest": is_likeliest,
    "log_z": log_z,
    "logits": logits,
  }
  lowering = model.placement.lower({mesh: model.placement})
  lowered, _ = lowering.call(exported)
  vocab_size = model.config.vocab_size  # without its padding
  top, likeliest = tf.math.top_k(
    tf.cast(lowered["logits"][..., :vocab_size], tf.float32),
    min(NUM_LIKELIEST, vocab_size),
  )
  return Program(
    {"inputs": inputs, "targets": targets, "num_given": num_given},
    {
      "token_loss": lowered["token_loss"],
      "is_likeliest": lowered["is_likeliest"],
      "likeliest": likeliest,
      "likeliest_loss": lowered["log_z"][..., tf.newaxis] - top,
    },
  )
