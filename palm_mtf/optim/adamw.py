# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""AdamW (Loshchilov and Hutter 2019).

For a variable p with gradient g, clipped by the global norm, at step k:

  m  <-  beta1 m + (1 - beta1) g
  v  <-  beta2 v + (1 - beta2) g^2
  u   =  m / (1 - beta1^k) / (sqrt(v / (1 - beta2^k)) + epsilon)
  p  <-  p - lr (u + WEIGHT_DECAY p)

If NORM_SCALE is "zero_centered", p is a norm's scale minus one.
"""

import functools
import math
from typing import Any

from palm_mtf._tf import tf
from palm_mtf.config.optimizer import AdamwConfig
from palm_mtf.ops.xla import fused_sum
from palm_mtf.optim.optimizer import Rule, clip_gradient
from palm_mtf.optim.schedule import learning_rate


def _moments(g, scalars, m, v):
  # Returns the update u and the next m and v, float32.
  clip, less1, less2, bias1, bias2, epsilon, *_ = tf.unstack(scalars)
  g, m = clip_gradient(g, clip), tf.cast(m, tf.float32)
  m += (g - m) * less1
  v += (tf.square(g) - v) * less2
  return m / bias1 / (tf.sqrt(v / bias2) + epsilon), m, v


@fused_sum
def _squares(g, scalars, m, v):
  return tf.square(_moments(g, scalars, m, v)[0])


def decayed(p: tf.Tensor, u: tf.Tensor, scalars: tf.Tensor) -> tf.Tensor:
  """Returns p after a step by the update u, with decay.

  The last items of `scalars`, [scalars] float32, are the learning rate, the
  share by which p - center shrinks, and center.
  """
  *_, rate, shrink, center = tf.unstack(scalars)
  return p - ((p - center) * shrink + rate * u)


def _step(values, g, scalars):
  p, m, v = values
  u, next_m, next_v = _moments(g, scalars, m, v)
  return decayed(p, u, scalars), tf.cast(next_m, m.dtype), next_v


class Adamw(Rule):
  """AdamW's update of one variable."""

  # The last two are 1 - beta^k, by which the biased moments are divided.
  RATES = ("learning_rate", "beta1_bias", "beta2_bias")

  @staticmethod
  def find_rates(k: tf.Tensor, config: AdamwConfig) -> list[tf.Tensor]:
    """Returns RATES for step k."""
    # expm1, because 1 - beta^k loses digits if it is near 0.
    biases = [
      -tf.math.expm1(k * math.log(beta)) if beta else tf.ones_like(k)
      for beta in (config.beta1, config.beta2)
    ]
    return [learning_rate(k, config), *biases]

  @property
  def momentum_decay(self) -> float:
    """The decay of m."""
    return self.config.beta1

  @functools.cached_property
  def scalars(self) -> Any:
    """Numbers that the devices compute, a LaidOutTensor [scalars] float32.

    The first two are the clip factor and 1 - momentum_decay.
    """
    return self.mesh_impl.slicewise(
      self._stack, self.clip, *self.rates.values()
    )

  def _stack(self, clip, rate, bias1, bias2):
    config = self.config
    shrink = rate * config.weight_decay if self.is_decayed else 0.0
    less1, less2 = 1.0 - self.momentum_decay, 1.0 - config.beta2
    of_moments = [less1, less2, bias1, bias2, config.adam_epsilon]
    return tf.stack([clip, *of_moments, rate, shrink, self.center])

  def update_squares(self) -> Any:
    """Returns the sum of u^2."""
    moments = self.value("momentum"), self.value("second_moment")
    return self.add_up(_squares, self.g, self.scalars, *moments)

  def assign(self, p_square: Any, u_square: Any) -> list[tf.Operation]:
    """Returns operations that assign each slice of p, m and v."""
    slots = "", "momentum", "second_moment"
    scalars = self.wait(self.scalars, p_square, u_square)
    return self.update(_step, slots, [scalars])
