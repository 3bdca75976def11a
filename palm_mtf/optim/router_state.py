# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Updates the states of routers, which depend on the choices of earlier steps.

With n_e, the number of a step's choices of expert e over all pods:

  router_load_e  =  n_e / sum of n
  router_bias_e +=  BALANCE_BIAS_RATE sign(mean of n - n_e)

(The second line is DeepSeek-V3, section 2.1.2.) The backward pass returns n in
place of a gradient. Neither the learning rate nor clipping applies.
"""

from typing import Any

from palm_mtf._tf import tf
from palm_mtf.architecture.block import LOAD
from palm_mtf.architecture.parameters import parse_name
from palm_mtf.optim.optimizer import Rule


def _load(values, counts):
  (load,) = values
  total = tf.reduce_sum(counts)
  return [tf.where_v2(total > 0, counts / tf.maximum(total, 1.0), load)]


def _bias(values, counts, rate):
  (bias,) = values
  return [bias + rate * tf.sign(tf.reduce_mean(counts) - counts)]


def _largest_load(counts):
  total = tf.maximum(tf.reduce_sum(counts), 1.0)
  return tf.reduce_max(counts) * counts.shape[0] / total


class RouterState(Rule):
  """The update of a state of one router."""

  def update_squares(self) -> Any:
    """Returns max n_e / mean n, the load of the busiest expert."""
    return self.mesh_impl.slicewise(_largest_load, self.g)

  def assign(self, p_square: Any, u_square: Any) -> list[tf.Operation]:
    """Returns operations that assign the state's slices."""
    self.g = self.wait(self.g, p_square, u_square)
    if parse_name(self.name).part == LOAD:
      return self.update(_load, [""], [])
    rate = tf.constant(self.variable.state_rate)
    on_devices = self.mesh_impl.slicewise(lambda _: tf.identity(rate), self.g)
    return self.update(_bias, [""], [on_devices])
