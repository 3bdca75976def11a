# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""PaLM's optimizer in PyTorch."""

# Written from the papers (PaLM 5; Shazeer and Stern 2018): Adafactor without
# factorization, momentum 0.9, beta2 = 1 - k^-0.8, updates and gradients clipped
# at 1, lr = min(0.01, 1 / sqrt(k)), weights decayed by lr^2.

from collections.abc import Iterable

import torch


def _root_mean_square(x):
  return x.square().mean().sqrt()


def _step(parameters, mean_squares, momenta, beta2, learning_rate):
  gradients = [p.grad for p in parameters]
  norm = sum(g.square().sum() for g in gradients).sqrt().clamp(min=1.0)
  for p, g, v, m in zip(
    parameters, gradients, mean_squares, momenta, strict=True
  ):
    g = g / norm
    v.mul_(beta2).add_((1 - beta2) * (g.square() + 1e-30))
    update = g * v.rsqrt()
    update = update / _root_mean_square(update).clamp(min=1.0)
    size = _root_mean_square(p).clamp(min=1e-3)
    m.mul_(0.9).add_(0.1 * learning_rate * size * update)
    p.sub_(learning_rate.square() * p + m)


class Adafactor:
  """Parameters, their mean squares and momenta."""

  def __init__(
    self, parameters: Iterable[torch.Tensor], *, compiled: bool = False
  ):
    """Starts at zero; `compiled` compiles the function of a step."""
    self.parameters = list(parameters)
    self.mean_squares, self.momenta = (
      [torch.zeros_like(p) for p in self.parameters] for _ in range(2)
    )
    self.num_steps = 0
    self._step = torch.compile(_step) if compiled else _step

  @torch.no_grad()
  def step(self) -> None:
    """Takes a step with the parameters' gradients, and clears them."""
    self.num_steps = k = self.num_steps + 1
    # Use tensors, because numbers would be compiled into the step, which would
    # be compiled again for each new number.
    numbers = [1 - k**-0.8, min(0.01, k**-0.5)]
    first = self.parameters[0]
    like = {"dtype": first.dtype, "device": first.device}
    self._step(
      self.parameters,
      self.mean_squares,
      self.momenta,
      *(torch.tensor(x, **like) for x in numbers),
    )
    for p in self.parameters:
      p.grad = None
