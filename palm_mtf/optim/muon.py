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
sums over: d_model of q [d_model, heads, d_kv], heads and d_kv of o.

The metrics measure n instead of O(n), whose size hardly changes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from palm_mtf._tf import mtf, tf
from palm_mtf.accounting.newton_schulz import shares_of
from palm_mtf.accounting.optimizer_state import row_rank
from palm_mtf.architecture.parameters import parse_name
from palm_mtf.config.muon import MuonConfig
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


def _newton_schulz(x, gram):
  return _A * x + matmul(_B * gram + _C * matmul(gram, gram), x)


def _step(values, g, scalars, update):
  p, m = values
  next_m, _ = _momenta(g, scalars, m)
  return decayed(p, update, scalars), tf.cast(next_m, m.dtype)


class Muon(Adamw):
  """Muon's update of one kernel, or AdamW's of another parameter."""

  def __init__(
    self,
    lowering: mtf.Lowering,
    variable: mtf.Variable,
    slots: Mapping[str, mtf.Variable],
    scalars: Sequence[mtf.Tensor],
    gradient: mtf.Tensor,
    config: MuonConfig,
  ):
    dims, rows = variable.shape.dims, row_rank(variable.name)
    self._steps = config.newton_schulz_steps(
      len(dims), parse_name(variable.name).is_kernel
    )
    super().__init__(lowering, variable, slots, scalars, gradient, config)
    self._axes = [self.mesh_impl.tensor_dimension_to_mesh_axis(x) for x in dims]
    parts = [
      1 if x is None else self.mesh_impl.shape[x].size for x in self._axes
    ]
    sizes = [x.size for x in dims]
    self._shares = shares_of(sizes, parts, rows)
    sides = math.prod(variable.sizes[:rows]), math.prod(variable.sizes[rows:])
    self._scale = _SCALE * math.sqrt(max(sides))

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
    """Returns O of a kernel with a norm of 1, times its scale."""
    impl, shares = self.mesh_impl, self._shares
    for i in shares.gathered:
      x = impl.allconcat(x, self._axes[i], i)
    shape = x.to_laid_out_tensor().slice_shape
    first, second = shares.first, shares.second
    sides = [second, first] if shares.is_transposed else [first, second]

    def turn(x):
      return tf.transpose(x) if shares.is_transposed else x

    x = impl.slicewise(lambda x: turn(tf.reshape(x, sides)), x)
    axes = sorted({self._axes[i] for i in shares.summed})
    for _ in range(self._steps):
      gram = impl.allreduce(impl.slicewise(_gram, x), axes, "SUM")
      x = impl.slicewise(_newton_schulz, x, gram)
    x = impl.slicewise(lambda x: tf.reshape(self._scale * turn(x), shape), x)
    for i in shares.gathered:
      x = impl.allsplit(x, self._axes[i], i)
    return x
