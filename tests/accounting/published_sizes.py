# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The three models of PaLM Table 1, and the number of norm scales."""

import math

from palm_mtf.architecture.parameters import parameter_shapes, parse_name
from palm_mtf.config import ModelConfig


def _palm(num_layers: int, num_heads: int, d_model: int) -> ModelConfig:
  return ModelConfig(
    num_layers=num_layers,
    d_model=d_model,
    num_heads=num_heads,
    d_kv=256,
    d_ff=4 * d_model,
    vocab_size=256_000,
    sequence_length=2048,
  )


PALM_8B = _palm(32, 16, 4096)
PALM_62B = _palm(64, 32, 8192)
PALM_540B = _palm(118, 48, 18432)


def count_norm_scales(config: ModelConfig) -> int:
  """Returns the number of elements in all norm scales."""
  return sum(
    math.prod(shape)
    for name, shape in parameter_shapes(config).items()
    if parse_name(name).is_scale
  )
