# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""PaLM's optimizer in JAX."""

# Written from the papers (PaLM 5; Shazeer and Stern 2018) for any tree of
# arrays: Adafactor without factorization, momentum 0.9, beta2 = 1 - k^-0.8,
# updates and gradients clipped at 1, lr = min(0.01, 1 / sqrt(k)), weights
# decayed by lr^2.

import jax
import jax.numpy as jnp


def init(params):
  """Returns the mean squares and the momenta before the first step."""
  return {
    name: jax.tree.map(jnp.zeros_like, params)
    for name in ("mean_squares", "momenta")
  }


def schedule(k: int) -> tuple[float, float]:
  """Returns beta2 and the learning rate of step k = 1, 2, ..."""
  return 1.0 - k**-0.8, min(0.01, k**-0.5)


def step(params, state, gradients, beta2, learning_rate):
  """Returns parameters and state after one step.

  Args:
    params: tree of float32 arrays.
    state: state that `init` or the previous step returned.
    gradients: tree with the structure of `params`.
    beta2: decay of the mean squares in this step.
    learning_rate: learning rate of this step.
  """
  leaves = jax.tree.leaves(gradients)
  norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in leaves))
  gradients = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), gradients)
  mean_squares = jax.tree.map(
    lambda v, g: beta2 * v + (1.0 - beta2) * (g * g + 1e-30),
    state["mean_squares"],
    gradients,
  )

  def momentum(m, p, g, v):
    # One array is one variable. Its update is clipped, and scaled by the root
    # mean square of the array.
    update = g / jnp.sqrt(v)
    update /= jnp.maximum(1.0, jnp.sqrt(jnp.mean(update**2)))
    size = jnp.maximum(1e-3, jnp.sqrt(jnp.mean(p**2)))
    return 0.9 * m + 0.1 * learning_rate * size * update

  momenta = jax.tree.map(
    momentum, state["momenta"], params, gradients, mean_squares
  )
  params = jax.tree.map(
    lambda p, m: p - learning_rate**2 * p - m, params, momenta
  )
  return params, {"mean_squares": mean_squares, "momenta": momenta}
