# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The frequencies of rotary embedding, also scaled for longer contexts.

Per position, pair i of n rotated numbers turns by base ** (-2 i / n) radians
(Su et al. 2021). ROTARY_SCALING divides these frequencies:

linear   all by `factor` (Chen et al. 2023)
llama3   pairs with fewer than `slow` turns within the original length by
         `factor`, and pairs with more than `fast` turns by 1; between these,
         frequencies are interpolated in turns (Llama 3.1's published code)
yarn     the same, but interpolated in i (Peng et al. 2023)
"""

import math
from typing import NamedTuple

import numpy as np

from palm_mtf.config import ModelConfig


class Rotary(NamedTuple):
  """How positions rotate q and k; `factor`, for example, is ROTARY_FACTOR."""

  size: int  # the first `size` numbers of each head are rotated
  pairs: str
  base: float
  scaling: str = "none"
  factor: float = 1.0
  original_length: int = 1
  slow: float = 1.0
  fast: float = 32.0
  truncate: bool = True
  attention_factor: float | None = None


def rotary_of(config: ModelConfig) -> Rotary | None:
  """Returns how positions rotate q and k; None if POSITIONS is not "rotary"."""
  if config.positions != "rotary":
    return None
  settings = {x: getattr(config, f"rotary_{x}") for x in Rotary._fields}
  return Rotary(**{k: x for k, x in settings.items() if x is not None})


def find_frequencies(rotary: Rotary) -> np.ndarray:
  """Returns each pair's radians per position, [size / 2], float64."""
  return _find_plain_frequencies(rotary) / find_divisors(rotary)


def find_divisors(rotary: Rotary) -> np.ndarray:
  """Returns ROTARY_SCALING's divisor per pair, [size / 2], float64."""
  pairs = np.arange(rotary.size // 2)
  # Share of each frequency that is not divided; `factor` divides the rest.
  kept = np.zeros(len(pairs))
  original = rotary.original_length / (2 * math.pi)
  if rotary.scaling == "llama3":
    turns = original * _find_plain_frequencies(rotary)
    kept = (turns - rotary.slow) / (rotary.fast - rotary.slow)
  elif rotary.scaling == "yarn":
    # The indices of the pairs that turn `fast` and `slow` times within the
    # original length, by the formula of the authors' code.
    first, last = (
      rotary.size / 2 * math.log(original / turns, rotary.base)
      for turns in (rotary.fast, rotary.slow)
    )
    if rotary.truncate:
      first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary.size - 1)
    kept = 1 - (pairs - first) / (last - first or 0.001)
  kept = np.clip(kept, 0, 1)
  return 1 / (kept + (1 - kept) / rotary.factor)


def find_magnitude(rotary: Rotary) -> float:
  """Returns the factor that multiplies rotated q and k; 1 except in YaRN."""
  if rotary.scaling != "yarn":
    return 1.0
  return rotary.attention_factor or yarn_magnitude(rotary.factor)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
  """Returns YaRN's factor for q and k (eq. 22); `weight` is "mscale" in HF."""
  return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0


def _find_plain_frequencies(rotary: Rotary) -> np.ndarray:
  pairs = rotary.size // 2
  return rotary.base ** (-np.arange(pairs) / pairs)
