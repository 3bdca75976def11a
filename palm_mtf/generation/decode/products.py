# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Products with decoding weights, on every device of a mesh."""

import functools
from collections.abc import Iterable, Mapping, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.block import Projection, Read
from palm_mtf.generation.decode.rows import LaidOut
from palm_mtf.generation.decode.weights import DecodeModel
from palm_mtf.model.projection import JoinedColumns, vectors_of
from palm_mtf.model.weights import logits_dtype
from palm_mtf.ops.slicewise import split_axes


class Products:
  """Multiplies rows of activations by the weights of one model.

  The decoding step (step.py) and the forward pass (forward.py) share this code.
  `layer` is the prefix of the layer's weights in their names.
  """

  def __init__(self, model: DecodeModel, *, is_step: bool):
    # `is_step`: whether the rows are those of a decoding step, which are few.
    self._impl, self._model, self._is_step = model.placement, model, is_step

  def _multiply(self, xs: Sequence[LaidOut], kernel: LaidOut) -> LaidOut:
    return self._model.multiply(xs, kernel, is_step=self._is_step)

  def _dims_of(self, names: Iterable[str]) -> list[mtf.Dimension]:
    return [getattr(self._model.dims, name) for name in names]

  def columns(self, read: Read, threads: int) -> JoinedColumns:
    """Returns an object that splits the columns of `project_in`.

    `threads` is the number of threads per C++ operation; 0 if XLA computes.
    """
    shapes = [
      self._impl.slice_shape(mtf.Shape(self._dims_of(each.outputs)))
      for each in read.projections
    ]
    return JoinedColumns(shapes, read, self._model.config.norm_epsilon, threads)

  def vectors(self, layer: str, read: Read) -> list[LaidOut]:
    """Returns the biases, and the scales of norms of q and k, for `read`."""
    names = vectors_of(read)
    return [self._model.vectors[f"{layer}/{name}"] for name in names]

  def project_in(self, x: LaidOut, layer: str, read: Read) -> LaidOut:
    """Multiplies x [rows, d_model] by the joined kernel of `read`."""
    names = tuple(f"{layer}/{part}" for part in read.parts)
    return self._multiply([x], self._model.kernels[names])

  def project_out(
    self, layer: str, branches: Mapping[Projection, LaidOut]
  ) -> LaidOut:
    """Multiplies each branch by its kernel; returns the sum, [rows, d_model].

    `branches` is {product: branch, [rows, inputs]}.
    """
    kernels = self._model.kernels
    if self._model.is_packed:
      names = tuple(f"{layer}/{each.part}" for each in branches)
      return self._multiply([*branches.values()], kernels[names])
    sums = {}
    for each, x in branches.items():
      y = self._multiply([x], kernels[f"{layer}/{each.part}",])
      axis = split_axes(self._impl, self._dims_of(each.inputs))
      sums.setdefault(tuple(axis), []).append(y)
    # Before the all-reduce, add the products that need the same mesh axes, so
    # that each set of axes takes only one all-reduce of [rows, d_model].
    return self._add(
      self._impl.allreduce(self._add(some), axis, "SUM")
      for axis, some in sums.items()
    )

  def output_biases(
    self, layer: str, outputs: Iterable[Projection]
  ) -> list[LaidOut]:
    """Returns the biases of some products, [d_model] float32 each."""
    vectors = self._model.vectors
    return [vectors[f"{layer}/{x.bias}"] for x in outputs if x.has_bias]

  def add_bias(self, x: LaidOut, bias: LaidOut) -> LaidOut:
    """Adds a vector to each row of x."""
    return self._impl.slicewise(
      lambda x, bias: x + tf.cast(bias, x.dtype), x, bias
    )

  def _add(self, xs: Iterable[LaidOut]) -> LaidOut:
    return functools.reduce(lambda x, y: self._impl.slicewise(tf.add, x, y), xs)

  def unembed(self, y: LaidOut) -> LaidOut:
    """Returns logits of y [rows, d_model]: [rows, vocab], LOGITS_DTYPE."""
    dtype, bias = logits_dtype(self._model.config), "logits/bias"
    y = self._impl.slicewise(lambda y: tf.cast(y, dtype), y)
    y = self._multiply([y], self._model.to_logits)
    vectors = self._model.vectors
    return self.add_bias(y, vectors[bias]) if bias in vectors else y

  def compute_logits(self, y: LaidOut) -> LaidOut:
    """Returns the logits of y [rows, d_model], not split along vocab."""
    logits = self.unembed(y)
    for axis in split_axes(self._impl, [self._model.dims.vocab]):
      # All-gather [rows, vocab], because every device samples from all logits.
      logits = self._impl.allconcat(logits, axis, 1)
    vocab_size = self._model.config.vocab_size
    if self._model.dims.vocab.size == vocab_size:
      return logits
    # The other logits are those of the embedding's padding rows.
    return self._impl.slicewise(lambda x: x[:, :vocab_size], logits)
