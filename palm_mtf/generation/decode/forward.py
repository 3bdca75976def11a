# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Forward pass of model/palm.py with decoding weights: prefill and scoring."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.generation.decode.products import Products
from palm_mtf.generation.decode.rows import Cache, LaidOut
from palm_mtf.generation.decode.weights import DecodeModel
from palm_mtf.mesh.placement import lower
from palm_mtf.model.layers import embed
from palm_mtf.model.palm import KeysAndValues, Palm
from palm_mtf.model.projection import JoinedColumns
from palm_mtf.model.weights import GATES, logits_dtype, positions_of
from palm_mtf.ops.slicewise import native_threads

# Each forward pass is a separate Mesh TensorFlow graph, lowered into the
# TensorFlow graph of a program. Kernels go in, and keys and values come out, as
# they lie on the devices: nothing is copied or gathered on the way.

# Rows of the cache that fill vector registers are read twice as fast.
_ALIGNMENT = 64


class _OnSlices(mtf.Operation):
  """Applies a function of laid-out tensors."""

  def __init__(
    self,
    fn: Callable[..., Sequence[LaidOut]],
    inputs: Sequence[mtf.Tensor],
    shapes: Sequence[mtf.Shape] = (),
    dtype: tf.DType | None = None,
  ):
    # The outputs have `shapes`, and `dtype` or else that of the first input.
    super().__init__(list(inputs), name="on_slices")
    self._fn = fn
    dtype = dtype or inputs[0].dtype
    self._outputs = [mtf.Tensor(self, shape, dtype) for shape in shapes]

  def lower(self, lowering: mtf.Lowering) -> None:
    """Lowers to what the function builds."""
    inputs = [lowering.tensors[x].to_laid_out_tensor() for x in self.inputs]
    for output, value in zip(self.outputs, self._fn(*inputs), strict=True):
      lowering.set_tensor_lowering(output, value)


class JoinedWeights:
  """Decoding weights as `Palm` reads them (model.weights.Weights)."""

  def __init__(self, mesh: mtf.Mesh, model: DecodeModel):
    self.mesh = mesh
    self._impl, self._dims = model.placement, model.dims
    self._model = model
    # Many rows at once hide the cost of unpacked kernels: oneDNN keeps no
    # second copy of the kernels.
    self._products = Products(model, packed=False)
    self._dtype = tf.as_dtype(model.config.activation_dtype)

  def _import(self, x: LaidOut, *dims: mtf.Dimension) -> mtf.Tensor:
    return mtf.import_laid_out_tensor(self.mesh, x, mtf.Shape(dims))

  def embed(self, tokens: mtf.Tensor) -> mtf.Tensor:
    """Returns rows of the embedding; see `Weights`."""
    dims = self._dims
    table = self._import(self._model.table, dims.vocab, dims.d_model)
    return embed(table, tokens)

  def scale(self, name: str, after: mtf.Tensor) -> mtf.Tensor:
    """Returns the scale of a norm; see `Weights`."""
    del after  # every device has all of it
    scale = self._model.scales[f"{name}/scale"]
    return self._import(scale, self._dims.d_model)

  def project_in(
    self,
    x: mtf.Tensor,
    layer: str,
    parts: Sequence[str],
    angles: Sequence[mtf.Tensor] = (),
  ) -> list[mtf.Tensor]:
    """Multiplies by one joined kernel; see `Weights`."""
    names = tuple(f"{layer}/{part}" for part in parts)
    shapes = self._products.shapes(names)
    is_gated = parts[-1] == GATES[-1]
    columns = JoinedColumns(shapes, is_gated, native_threads(self._impl))

    def project(y: LaidOut, *angles: LaidOut) -> Sequence[LaidOut]:
      rows = y.slice_shape[:2]  # batch and length of the slice
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
    """Adds up products; see `Weights`."""

    def project(*xs: LaidOut) -> LaidOut:
      return self._products.project_out(dict(zip(branches, xs, strict=True)))

    return self._of_rows(
      project, list(branches.values()), self._dims.d_model, self._dtype
    )

  def unembed(self, x: mtf.Tensor) -> mtf.Tensor:
    """Multiplies by the transposed table; see `Weights`."""
    return self._of_rows(
      self._products.unembed,
      [x],
      self._dims.vocab,
      logits_dtype(self._model.config),
    )

  def _of_rows(
    self,
    fn: Callable[..., LaidOut],
    xs: list[mtf.Tensor],
    output: mtf.Dimension,
    dtype: tf.DType,
  ) -> mtf.Tensor:
    # `fn` takes rows, [batch * length, inputs], and returns [rows, output].
    def apply(*xs: LaidOut) -> list[LaidOut]:
      batch, length = xs[0].slice_shape[:2]

      def flat(x):
        return tf.reshape(x, [batch * length, -1])

      rows = fn(*(self._impl.slicewise(flat, x) for x in xs))
      return [
        self._impl.slicewise(lambda y: tf.reshape(y, [batch, length, -1]), rows)
      ]

    shape = mtf.Shape([*xs[0].shape.dims[:2], output])
    return _OnSlices(apply, xs, [shape], dtype).outputs[0]


def build_palm(
  model: DecodeModel, num_rows: int, length: int
) -> tuple[mtf.Mesh, mtf.Shape, Palm]:
  """Returns a mesh, the shape of tokens on it, and the forward pass over them.

  Args:
    model: weights.
    num_rows: number of rows, divisible by the mesh axis of `batch`.
    length: tokens in a row, at most the model's sequence_length.
  """
  mesh = mtf.Mesh(mtf.Graph(), "pod")
  dims = dataclasses.replace(
    model.dims,
    batch=mtf.Dimension("batch", num_rows),
    length=mtf.Dimension("length", length),
    memory_length=mtf.Dimension("memory_length", length),
  )
  # Without a backward pass nothing is recomputed.
  config = dataclasses.replace(model.config, remat="none")
  palm = Palm(config, dims, JoinedWeights(mesh, model))
  return mesh, mtf.Shape([dims.batch, dims.length]), palm


def one_prefix(prefix: mtf.Tensor) -> tuple[mtf.Tensor, mtf.Tensor]:
  """Returns `segments` and `prefix` of `Palm` for one document per row.

  Args:
    prefix: [batch, length], int32: 1 where tokens are given, else 0.
  """
  return mtf.zeros_like(prefix), prefix


def prefill(
  model: DecodeModel,
  prompts: tf.Tensor,
  lengths: LaidOut,
  num_positions: int,
) -> Cache:
  """Returns keys and values of prompts, by one forward pass.

  The first step afterwards reads the last token of a prompt once more, for its
  logits.

  Args:
    model: weights.
    prompts: [batch, length], int32, each from the left.
    lengths: [batch], int32: tokens of each prompt, laid out.
    num_positions: positions that the cache has at least; not below `length`.
  """
  impl, (num_rows, length) = model.placement, prompts.shape
  memory_length = -(-num_positions // _ALIGNMENT) * _ALIGNMENT
  mesh, shape, palm = build_palm(model, num_rows, length)
  masks = [None, None]
  if model.config.has_prefix:  # prompts are inputs
    prefix = impl.slicewise(
      lambda n: tf.sequence_mask(n, length, tf.int32), lengths
    )
    masks = one_prefix(mtf.import_laid_out_tensor(mesh, prefix, shape))
  keys_and_values: KeysAndValues = []
  palm.hidden(
    mtf.import_tf_tensor(mesh, prompts, shape), *masks, keys_and_values
  )
  # Mesh TensorFlow exports whole tensors; these stay in slices.
  laid_out: list[LaidOut] = []
  _OnSlices(
    lambda *xs: laid_out.extend(xs) or [], [*itertools.chain(*keys_and_values)]
  )
  lower({mesh: impl}, {})

  # Positions after a prompt have keys and values too: no position of the prompt
  # sees them, and steps overwrite them.
  def store(x):
    if x.shape.rank == 4:  # multi-head: a step multiplies by each head apart
      x = tf.transpose(x, [0, 2, 1, 3])
    before = [[0, 0]] * (x.shape.rank - 2)
    return tf.pad(x, [*before, [0, memory_length - length], [0, 0]])

  return [impl.slicewise(store, x) for x in laid_out]
