# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Adafactor in the form that trained PaLM (section 5), and in other forms.

For a variable p with gradient g, clipped by the global norm, at step k:

  v  <-  beta2 v + (1 - beta2) (g^2 + 1e-30)         beta2 = 1 - k^-0.8
  u   =  g / sqrt(v)
  u  <-  u / max(1, RMS(u) / UPDATE_CLIP)
  m  <-  beta1 m + (1 - beta1) lr max(1e-3, RMS(p)) u
  p  <-  p (1 - lr^2) - m                            lr = min(1e-2, 1/sqrt(k))

This is Adam with a learning rate relative to the variable's root mean square
(RMS). If NORM_SCALE is "zero_centered", p is a norm's scale minus one.
"""

from collections.abc import Sequence
from typing import Any

from palm_mtf._tf import mtf, tf
from palm_mtf.accounting.optimizer_state import row_rank
from palm_mtf.architecture.parameters import parse_name
from palm_mtf.config import AdafactorConfig
from palm_mtf.ops.xla import fused_sum
from palm_mtf.optim.optimizer import Rule
from palm_mtf.optim.schedule import learning_rate
from palm_mtf.optim.second_moment import (
  FactoredMoment,
  factored_update,
  full_update,
)

# m (momentum) and v (second moment) start at zero; v needs no bias correction,
# because beta2 is 0 at the first step. A factored v takes a third pass over
# memory.


@fused_sum
def _full_squares(g, clip, one_minus_beta2, v):
  u, _ = full_update(g, clip, one_minus_beta2, v)
  return tf.square(u)


@fused_sum
def _factored_squares(g, clip, row, column):
  return tf.square(factored_update(g, clip, row, column))


def _step_values(p, m, u, beta1, step_size, shrink, center):
  # Returns the next parameter p and momentum m; `m` is [] without momentum.
  change = step_size * u
  if m:
    change += beta1 * tf.cast(m[0], tf.float32)
  p -= (p - center) * shrink + change
  return p, *(tf.cast(change, x.dtype) for x in m)


def _full_step(values, g, scalars):
  p, *m, v = values
  clip, one_minus_beta2, *others = tf.unstack(scalars)
  u, next_v = full_update(g, clip, one_minus_beta2, v)
  return (*_step_values(p, m, u, *others), tf.cast(next_v, v.dtype))


def _factored_step(values, g, scalars, row, column):
  p, *m = values
  clip, _, *others = tf.unstack(scalars)
  u = factored_update(g, clip, row, column)
  return _step_values(p, m, u, *others)


# The PaLM paper multiplies the learning rate by the root mean square of "the
# parameter matrix", but does not say what the matrices are. If PARAMETER_SCALE
# is "variable", each variable is one matrix. If it is "stacked", the matrices
# are those of PaLM's published inference code, where three matrices hold the
# kernels of all layers: the table below names each kernel's matrix. The `norm`
# scales of all layers form another matrix, and so do the `mlp_norm` scales, and
# each kind of kernel of experts. A parameter that is not trained (FROZEN) is in
# no matrix.
_STACKED_WITH = {
  **dict.fromkeys(("attention/q", "mlp/wi_gate", "mlp/wi"), "q_wi"),
  **dict.fromkeys(("attention/k", "attention/v"), "kv"),
  **dict.fromkeys(("attention/o", "mlp/wo"), "o_wo"),
}


def one_minus_beta2(k: tf.Tensor, config: AdafactorConfig) -> tf.Tensor:
  """Returns 1 - beta2 = k ** -BETA2_EXPONENT at step k, [] float32 both."""
  # Callers do not use beta2, because at PaLM's last step 1 - beta2 is 5e-5, and
  # in float32 1 - (1 - 5e-5) has a relative error of a thousandth.
  return tf.pow(k, -config.beta2_exponent)


class Adafactor(Rule):
  """Adafactor's update of one variable."""

  RATES = ("learning_rate", "one_minus_beta2")

  @staticmethod
  def find_rates(k: tf.Tensor, config: AdafactorConfig) -> list[tf.Tensor]:
    """Returns RATES for step k."""
    return [learning_rate(k, config), one_minus_beta2(k, config)]

  @staticmethod
  def scale_group(name: str, config: AdafactorConfig) -> str:
    """Returns the name of the matrix whose root mean square scales lr."""
    parameter = parse_name(name)
    if config.parameter_scale != "stacked" or parameter.layer is None:
      return name
    return _STACKED_WITH.get(parameter.part, parameter.part)

  def __init__(
    self,
    lowering: mtf.Lowering,
    variable: mtf.Variable,
    slots: dict[str, mtf.Variable],
    scalars: Sequence[mtf.Tensor],
    gradient: mtf.Tensor,
    config: AdafactorConfig,
  ):
    super().__init__(lowering, variable, slots, scalars, gradient, config)
    self.value("")
    # `moment` is (v,) or, if v is factored, (row means, column means).
    moment = tuple(self.value(x) for x in slots if x != "momentum")
    decay = self.rates["one_minus_beta2"]
    self._next_means, self._factors = (), ()
    if len(moment) == 1:
      self._squares, self._step = _full_squares, _full_step
      self._of_squares = decay, *moment
    else:
      self._squares, self._step = _factored_squares, _factored_step
      factored = FactoredMoment(
        self.mesh_impl, variable.shape.dims, variable.sizes, row_rank(self.name)
      )
      self._next_means = factored.next_means(self.g, self.clip, decay, *moment)
      self._factors = factored.row_and_column_factors(*self._next_means)
      self._of_squares = self._factors

  def update_squares(self) -> Any:
    """Returns the sum of u^2 before UPDATE_CLIP scales u."""
    return self.add_up(self._squares, self.g, self.clip, *self._of_squares)

  def assign(self, p_square: Any, u_square: Any) -> list[tf.Operation]:
    """Returns operations that assign each slice of p and of its slots."""
    scalars = self.mesh_impl.slicewise(
      self._scalars,
      *(self.clip, self.rates["one_minus_beta2"], self.rates["learning_rate"]),
      *(p_square, u_square),
    )
    whole = ("", "momentum", "second_moment")
    operations = self.update(
      self._step,
      [x for x in whole if x in self.slots],
      [scalars, *self._factors],
    )
    means = [x for name, x in self.slots.items() if name not in whole]
    for slot, value in zip(means, self._next_means, strict=True):
      assign = self.mesh_impl.assign_if_finite
      operations += assign(slot, value, self.is_finite)
    return operations

  def _scalars(self, clip, one_minus_beta2, learning_rate, p_square, u_square):
    # Returns the six scalars that are stacked below, [6] float32. Devices
    # compute the scalars, so that no step waits for the session's client.
    config = self.config
    step_size = (1.0 - config.beta1) * learning_rate
    if config.parameter_scale != "off":
      scale = tf.maximum(config.parameter_scale_floor, tf.sqrt(p_square))
      step_size *= scale
    if config.update_clip is not None:
      step_size /= tf.maximum(1.0, tf.sqrt(u_square) / config.update_clip)
    # `shrink` is lr^2 and not 1 - lr^2, because 1 - lr^2 loses digits of lr^2.
    shrink = 0.0
    if self.is_decayed and config.weight_decay_exponent is not None:
      shrink = learning_rate**config.weight_decay_exponent
    return tf.stack(
      [clip, one_minus_beta2, config.beta1, step_size, shrink, self.center]
    )
