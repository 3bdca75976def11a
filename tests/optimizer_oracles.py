# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""AdamW and Muon in plain float64 NumPy, one parameter after another.

They are written only from the papers (Loshchilov and Hutter 2019, Algorithm 2,
with the learning rate as its multiplier; Jordan et al. 2024; for the factor of
updates, Liu et al. 2025, section 2.2), and share no code with palm_mtf.
`optimizer` has the fields of AdamwConfig or MuonConfig.
"""

import math

import numpy as np

from tests.oracle import as_matrix


class Adamw:
  """AdamW; `slots` has m and v by the names of a checkpoint's variables."""

  def __init__(self, optimizer, params):
    self.optimizer, self.step_number = optimizer, 0
    self.slots = {}
    for name, p in params.items():
      self.slots[f"{name}/momentum"] = np.zeros_like(p)
      if not self.is_matrix(name):
        self.slots[f"{name}/second_moment"] = np.zeros_like(p)
    self.gradient_norm = 0.0
    self.updates = {}

  def is_matrix(self, name):
    """Returns whether Muon updates a parameter."""
    return False

  def learning_rate(self):
    """Returns the rate of the current step."""
    settings, k = self.optimizer, self.step_number
    rate, length = settings.learning_rate, settings.learning_rate_decay_steps
    if settings.learning_rate_schedule == "palm":
      return min(rate, k**-0.5)
    if length:
      done = min(k / length, 1.0)
      return rate * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)
    return rate

  def step(self, params, gradients):
    """Returns the parameters after one more step; `params` is not changed."""
    settings = self.optimizer
    self.step_number += 1
    squares = [np.sum(g**2) for g in gradients.values()]
    self.gradient_norm = math.sqrt(sum(squares))
    clip = min(1.0, settings.gradient_clip / self.gradient_norm)
    stepped, rate = {}, self.learning_rate()
    for name, p in params.items():
      u = self.update(name, clip * gradients[name])
      last = name.rpartition("/")[2]
      spared = {
        "all": (),
        "all_but_scales": ("scale",),
        "kernels": ("scale", "embedding"),
      }[settings.weight_decay_on]
      decay = 0.0 if last in spared else settings.weight_decay
      zero_centered = settings.norm_scale == "zero_centered"
      center = float(zero_centered and last == "scale")
      stepped[name] = p - rate * u - rate * decay * (p - center)
    return stepped

  def update(self, name, g):
    """Returns u; updates m and v."""
    beta1, beta2 = self.optimizer.beta1, self.optimizer.beta2
    k = self.step_number
    m = beta1 * self.slots[f"{name}/momentum"] + (1 - beta1) * g
    v = beta2 * self.slots[f"{name}/second_moment"] + (1 - beta2) * g**2
    self.slots[f"{name}/momentum"] = m
    self.slots[f"{name}/second_moment"] = v
    m_hat, v_hat = m / (1 - beta1**k), v / (1 - beta2**k)
    u = m_hat / (np.sqrt(v_hat) + self.optimizer.adam_epsilon)
    self.updates[name] = u
    return u


class Muon(Adamw):
  """Muon for the kernels of layers, AdamW for the rest."""

  def is_matrix(self, name):
    last = name.rpartition("/")[2]
    return name.startswith("layer_") and not last.endswith(("scale", "bias"))

  def update(self, name, g):
    if not self.is_matrix(name):
      return super().update(name, g)
    beta = self.optimizer.momentum
    m = beta * self.slots[f"{name}/momentum"] + (1 - beta) * g
    self.slots[f"{name}/momentum"] = m
    n = self.updates[name] = beta * m + (1 - beta) * g
    if "/experts/" in name:
      return np.stack([scaled(each) for each in n])
    return scaled(as_matrix(name, n)).reshape(g.shape)


def scaled(matrix):
  """Returns the orthogonalized matrix, times the factor of Liu et al."""
  return 0.2 * math.sqrt(max(matrix.shape)) * newton_schulz(matrix)


def newton_schulz(matrix, steps=5):
  """Returns `matrix` after steps that bring its singular values near 1."""
  a, b, c = 3.4445, -4.7750, 2.0315
  x = matrix / max(np.linalg.norm(matrix), 1e-7)
  for _ in range(steps):
    gram = x @ x.T
    x = a * x + (b * gram + c * gram @ gram) @ x
  return x
