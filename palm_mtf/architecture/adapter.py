# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters: small trained parameters of a model whose others are frozen.

lora     x W + s (x A) B                       (Hu et al. 2022)
dora     m (x W + s (x A) B) / ||W + s A B||   (Liu et al. 2024)
prefix   keys and values in each layer         (Li and Liang 2021)
prompt   embeddings                            (Lester et al. 2021)

W is a kernel [inputs..., outputs...], A is [inputs..., rank], B is [rank,
outputs...], s is the scale. The magnitude m and the norms, over the inputs, are
[outputs...]. Names of A, B and m are the kernel's name and an ending.

The last two are of virtual positions: the first ADAPTER_LENGTH positions of a
document, which hold no tokens. The keys k_virtual and values v_virtual replace
those that a layer computes there, and virtual_embedding replaces embeddings.
"""

import fnmatch
import math
from typing import Any, NamedTuple

from palm_mtf.config import ModelConfig

A, B, MAGNITUDE = "_lora_a", "_lora_b", "_magnitude"  # ends of names
VIRTUAL, PROMPT = "_virtual", "virtual_embedding"


class LowRank(NamedTuple):
  """How a kernel is adapted."""

  rank: int
  scale: float  # of the product of A and B
  has_magnitude: bool


def adapter_scale(rule: str, alpha: float, rank: int) -> float:
  """Returns the factor of A B; `rule` is ADAPTER_SCALE.

  It is alpha / rank (Hu et al. 2022) or, stabilized for large ranks, alpha /
  sqrt(rank) (Kalajdzievski 2023).
  """
  return alpha / {"rank": rank, "sqrt_rank": math.sqrt(rank)}[rule]


def column_factors(xp: Any, magnitude: Any, squares: Any) -> Any:
  """Returns m / ||w||, the factor of each column of w, [outputs...].

  `squares` is the sum of squares of each column. `xp` is numpy or TensorFlow.
  """
  # A column of zeros has no direction; its product is 0.
  return magnitude / xp.sqrt(xp.maximum(squares, 1e-24))


def low_rank_of(config: ModelConfig) -> LowRank | None:
  """Returns how the settings adapt a kernel; None for no adapter."""
  if not config.adapter_rank:
    return None
  assert config.adapter_alpha
  scale = adapter_scale(
    config.adapter_scale, config.adapter_alpha, config.adapter_rank
  )
  return LowRank(config.adapter_rank, scale, config.adapter == "dora")


def is_target(config: ModelConfig, part: str) -> bool:
  """Returns whether ADAPTER_TARGETS matches the kernel `part` of a layer."""
  patterns = config.adapter_targets or ("*",)
  return any(fnmatch.fnmatchcase(part, x) for x in patterns)


def base_part(name: str) -> str | None:
  """Returns the name of the kernel that a parameter adapts, or None."""
  found = [x for x in (A, B, MAGNITUDE) if name.endswith(x)]
  return name.removesuffix(found[0]) if found else None
