# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Muon (Jordan et al. 2024) for kernels; AdamW for all other parameters.

For a kernel p with gradient g, clipped by the global norm:

  m  <-  MOMENTUM m + (1 - MOMENTUM) g
  n   =  MOMENTUM m + (1 - MOMENTUM) g                  (Nesterov's momentum)
  p  <-  p - lr (0.2 sqrt(max(rows, columns)) O(n) + WEIGHT_DECAY p)

O(n) is nearly the orthogonal matrix closest to n: X = n / |n|, the Frobenius
norm, then five Newton-Schulz steps X <- a X + (b A + c A^2) X with A = X X^T.
The factor of O(n) makes its root mean square that of AdamW's updates, about
0.2 (Liu et al. 2025, "Muon is Scalable for LLM Training"), so that one learning
rate serves all parameters. Rows of a kernel are the dimensions that its product
sums over: d_model of q [d_model, heads, d_kv], heads and d_kv of o. A kernel of
experts [experts, rows, columns] is one matrix n per expert.

The metrics measure n instead of O(n), whose size hardly changes.
"""

import math
from typing import Any

from palm_mtf._tf import tf
from palm_mtf.accounting.newton_schulz import shares_of
from palm_mtf.accounting.optimizer_state import row_rank
from palm_mtf.architecture.parameters import parse_name
from palm_mtf.ops.matmul import matmul
from palm_mtf.ops.xla import fused, fused_sum
from palm_mtf.optim.adamw import Adamw, decayed
from palm_mtf.optim.optimizer import clip_gradient

_A, _B, _C = 3.4445, -4.7750, 2.0315
_SMALLEST_NORM = 1e-7  # a gradient of 0 gives an update of 0
_SCALE = 0.2


def _momenta(g, scalars, m):
  # Returns the next m and n, float32.
  clip, less, *_ = tf.unstack(scalars)
  g, m = clip_gradient(g, clip), tf.cast(m, tf.float32)
  m += (g - m) * less
  return m, m + (g - m) * less


@fused_sum
def _squares(g, scalars, m):
  return tf.square(_momenta(g, scalars, m)[1])


@fused
def _normalize(g, scalars, m, norm):
  return _momenta(g, scalars, m)[1] / tf.maximum(norm, _SMALLEST_NORM)


def _gram(x):
  return matmul(x, x, transpose_b=True)


@fused
def _normalize_each(x, gram):
  # Divides each expert's X by its own norm; the trace of X X^T is |X|^2.
  norm = tf.maximum(tf.sqrt(tf.linalg.trace(gram)), _SMALLEST_NORM)
  norm = norm[:, tf.newaxis, tf.newaxis]
  return x / norm, gram / tf.square(norm)


def _newton_schulz(x, gram):
  return _A * x + matmul(_B * gram + _C * matmul(gram, gram), x)


def _step(values, g, scalars, update):
  p, m = values
  next_m, _ = _momenta(g, scalars, m)
  return decayed(p, update, scalars), tf.cast(next_m, m.dtype)


class Muon(Adamw):
  """Muon's update of one kernel, or AdamW's of another parameter."""

  @property
  def _steps(self) -> int:
    is_kernel = parse_name(self.name).is_kernel
    rank = self.variable.shape.ndims
    steps: int = self.config.newton_schulz_steps(rank, is_kernel)
    return steps

  def update_squares(self) -> Any:
    """Returns the sum of n^2 for a kernel, and of u^2 otherwise."""
    if not self._steps:
      return super().update_squares()
    return self.add_up(_squares, *self._given())

  def _given(self) -> tuple:
    return self.g, self.scalars, self.value("momentum")

  @property
  def momentum_decay(self) -> float:
    """The decay of m."""
    return self.config.momentum if self._steps else super().momentum_decay

  def assign(self, p_square: Any, u_square: Any) -> list[tf.Operation]:
    """Returns operations that assign each slice of the variable and slots."""
    if not self._steps:
      return super().assign(p_square, u_square)
    norm = self.mesh_impl.slicewise(
      lambda mean: tf.sqrt(mean * float(self.size)), u_square
    )
    x = self.mesh_impl.slicewise(_normalize, *self._given(), norm)
    scalars = self.wait(self.scalars, p_square, u_square)
    given = [scalars, self._orthogonalize(x)]
    return self.update(_step, ["", "momentum"], given)

  def _orthogonalize(self, x: Any) -> Any:
    """Returns O of a kernel, which has a norm of 1, times its factor."""
    impl, dims = self.mesh_impl, self.variable.shape.dims
    axis_of = [impl.tensor_dimension_to_mesh_axis(dim) for dim in dims]
    parts = [1 if i is None else impl.shape[i].size for i in axis_of]
    sizes, rows = [dim.size for dim in dims], row_rank(self.name)
    begin = int(parse_name(self.name).is_expert)
    shares = shares_of(sizes, parts, rows, begin)
    scale = _SCALE * math.sqrt(
      max(math.prod(sizes[begin:rows]), math.prod(sizes[rows:]))
    )
    for i in shares.gathered:
      x = impl.allconcat(x, axis_of[i], i)
    shape, sides = x.slice_shape, (shares.first, shares.second)
    to_matrix = sides[::-1] if shares.is_transposed else sides
    to_matrix = *shares.stack, *to_matrix

    def turn(x):
      return tf.linalg.matrix_transpose(x) if shares.is_transposed else x

    x = impl.slicewise(lambda x: turn(tf.reshape(x, to_matrix)), x)
    axes = sorted({axis_of[i] for i in shares.summed})
    for step in range(self._steps):
      gram = impl.allreduce(impl.slicewise(_gram, x), axes, "SUM")
      if shares.stack and not step:
        x, gram = impl.slicewise(_normalize_each, x, gram)
      x = impl.slicewise(_newton_schulz, x, gram)
    x = impl.slicewise(lambda x: tf.reshape(scale * turn(x), shape), x)
    for i in shares.gathered:
      x = impl.allsplit(x, axis_of[i], i)
    return x
