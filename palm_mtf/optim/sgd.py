# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Stochastic gradient descent: p <- p - lr g, g clipped by the global norm."""

from typing import Any

from palm_mtf._tf import tf
from palm_mtf.config.optimizer import SgdConfig
from palm_mtf.ops.xla import fused_sum
from palm_mtf.optim.optimizer import Rule, clip_gradient
from palm_mtf.optim.schedule import learning_rate


@fused_sum
def _squares(g, scalars):
  return tf.square(clip_gradient(g, scalars[0]))


def _step(values, g, scalars):
  (p,) = values
  return (p - scalars[1] * clip_gradient(g, scalars[0]),)


class Sgd(Rule):
  """The update of one variable."""

  RATES = ("learning_rate",)

  @staticmethod
  def find_rates(k: tf.Tensor, config: SgdConfig) -> list[tf.Tensor]:
    """Returns RATES for step k."""
    return [learning_rate(k, config)]

  def _scalars(self) -> Any:
    """Returns the clip factor and the learning rate, [2] float32."""
    rate = self.rates["learning_rate"]
    return self.mesh_impl.slicewise(lambda *x: tf.stack(x), self.clip, rate)

  def update_squares(self) -> Any:
    """Returns the sum of the squares of the clipped gradient."""
    return self.add_up(_squares, self.g, self._scalars())

  def assign(self, p_square: Any, u_square: Any) -> list[tf.Operation]:
    """Returns operations that assign each slice of p."""
    scalars = self.wait(self._scalars(), p_square, u_square)
    return self.update(_step, [""], [scalars])
