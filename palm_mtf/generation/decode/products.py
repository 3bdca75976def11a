# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Products with the joined kernels of a model, on every device of a mesh."""

import functools
from collections.abc import Iterable, Mapping, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.generation.decode.kernels import multiply
from palm_mtf.generation.decode.rows import LaidOut
from palm_mtf.generation.decode.weights import DecodeModel
from palm_mtf.model.weights import logits_dtype
from palm_mtf.ops.slicewise import split_axes


class Products:
  """Multiplies rows of activations by the weights of one model.

  The decoding step (step.py) and the forward pass (forward.py) share this code.
  """

  def __init__(self, model: DecodeModel, *, packed: bool):
    """Takes the weights; for `packed`, see `kernels.multiply`."""
    self._impl = model.placement
    self._model = model
    self._packed = packed

  def shapes(self, names: Sequence[str]) -> list[list[int]]:
    """Returns the output shape of each part of a joined kernel, for one row.

    The parts are the kernels `names`. The shape is that of one device's slice,
    such as [heads, d_kv] for q.
    """
    dims = self._model.kernels[tuple(names)].dims
    return [self._impl.slice_shape(mtf.Shape(part)) for part in dims]

  def multiply(self, xs: Sequence[LaidOut], kernel: LaidOut) -> LaidOut:
    """Calls kernels.multiply on each device, with that device's arguments."""
    return self._impl.slicewise(
      lambda kernel, *xs: multiply(xs, kernel, packed=self._packed), kernel, *xs
    )

  def project_in(self, x: LaidOut, names: Sequence[str]) -> LaidOut:
    """Multiplies x [rows, d_model] by the joined kernel of `names`."""
    return self.multiply([x], self._model.kernels[tuple(names)].kernel)

  def project_out(self, branches: Mapping[str, LaidOut]) -> LaidOut:
    """Multiplies each branch by its kernel; returns the sum, [rows, d_model].

    `branches` is {name of a kernel: branch, [rows, inputs]}.
    """
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

  def _add(self, xs: Iterable[LaidOut]) -> LaidOut:
    return functools.reduce(lambda x, y: self._impl.slicewise(tf.add, x, y), xs)

  def unembed(self, y: LaidOut) -> LaidOut:
    """Returns y times the transposed embedding: [rows, vocab], LOGITS_DTYPE."""
    dtype = logits_dtype(self._model.config)
    y = self._impl.slicewise(lambda y: tf.cast(y, dtype), y)
    return self.multiply([y], self._model.to_logits)

  def compute_logits(self, y: LaidOut) -> LaidOut:
    """Returns the logits of y [rows, d_model], unsplit along vocab."""
    logits = self.unembed(y)
    for axis in split_axes(self._impl, [self._model.dims.vocab]):
      # All-gather [rows, vocab], because every device samples from all logits.
      logits = self._impl.allconcat(logits, axis, 1)
    vocab_size = self._model.config.vocab_size
    if self._model.dims.vocab.size == vocab_size:
      return logits
    # Drop the logits of embedding rows that are only padding.
    return self._impl.slicewise(lambda x: x[:, :vocab_size], logits)
