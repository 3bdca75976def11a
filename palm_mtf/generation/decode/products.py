# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Products with decoding weights, on every device of a mesh."""

import functools
from collections.abc import Iterable, Mapping, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.block import (
  Projection,
  Read,
)
from palm_mtf.generation.decode.rows import LaidOut
from palm_mtf.generation.decode.weights import DecodeModel
from palm_mtf.model.projection import JoinedColumns, vectors_of
from palm_mtf.model.weights import logits_dtype
from palm_mtf.ops.slicewise import split_axes


class Products:
  """Multiplies rows of activations by the weights of one model.

  The decoding step (step.py) and the forward pass (forward.py) share this code.
  """

  def __init__(self, model: DecodeModel, *, is_step: bool):
    """Takes the weights; for `is_step`, see `kernels.multiply`."""
    self._impl = model.placement
    self._model = model
    self._is_step = is_step

  def shapes(self, names: Sequence[str]) -> list[list[int]]:
    """Returns the output shape of each part of a joined kernel, for one row.

    The parts are the kernels `names`. The shape is that of one device's slice,
    such as [heads, d_kv] for q.
    """
    dims = self._model.kernels[tuple(names)].dims
    return [self._impl.slice_shape(mtf.Shape(part)) for part in dims]

  def columns(self, layer: str, read: Read, threads: int) -> JoinedColumns:
    """Returns an object that splits the columns of `project_in`.

    Args:
      layer: prefix of the kernels' names.
      read: the branches that read the product.
      threads: see `JoinedColumns`.
    """
    shapes = self.shapes([f"{layer}/{part}" for part in read.parts])
    return JoinedColumns(shapes, read, self._model.config.norm_epsilon, threads)

  def vectors(self, layer: str, read: Read) -> list[LaidOut]:
    """Returns the `vectors` of `read_product`."""
    names = vectors_of(read)
    return [self._model.vectors[f"{layer}/{name}"] for name in names]

  def multiply(self, xs: Sequence[LaidOut], kernel: LaidOut) -> LaidOut:
    """Multiplies rows by a kernel; see `DecodeModel.multiply`."""
    return self._model.multiply(xs, kernel, is_step=self._is_step)

  def project_in(self, x: LaidOut, names: Sequence[str]) -> LaidOut:
    """Multiplies x [rows, d_model] by the joined kernel of `names`."""
    return self.multiply([x], self._model.kernels[tuple(names)].kernel)

  def project_out(
    self, layer: str, branches: Mapping[Projection, LaidOut]
  ) -> LaidOut:
    """Multiplies each branch by its kernel; returns the sum, [rows, d_model].

    Args:
      layer: prefix of the kernels' names.
      branches: {product: branch, [rows, inputs]}.
    """
    return self._project_out(
      {f"{layer}/{each.part}": x for each, x in branches.items()}
    )

  def output_biases(
    self, layer: str, outputs: Iterable[Projection]
  ) -> list[LaidOut]:
    """Returns the biases of some products, [d_model] float32 each."""
    vectors = self._model.vectors
    return [vectors[f"{layer}/{x.bias}"] for x in outputs if x.has_bias]

  def _project_out(self, branches: Mapping[str, LaidOut]) -> LaidOut:
    kernels, names = self._model.kernels, tuple(branches)
    if self._model.is_packed:
      return self.multiply([*branches.values()], kernels[names].kernel)
    sums = {}
    for name, x in branches.items():
      joined = kernels[name,]
      axis = tuple(split_axes(self._impl, joined.dims[0]))
      sums.setdefault(axis, []).append(self.multiply([x], joined.kernel))
    # Before the all-reduce, add the products that need the same mesh axes, so
    # that each set of axes takes only one all-reduce of [rows, d_model].
    return self._add(
      self._impl.allreduce(self._add(some), axis, "SUM")
      for axis, some in sums.items()
    )

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
    y = self.multiply([y], self._model.to_logits)
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
    # Drop the logits of embedding rows that are only padding.
    return self._impl.slicewise(lambda x: x[:, :vocab_size], logits)
