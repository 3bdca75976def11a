# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""FLOPs of training, and model FLOPs utilization (PaLM Appendix B)."""

from palm_mtf.accounting.params import count_parameters
from palm_mtf.config.model import PalmConfig


def attention_flops_per_token(config: PalmConfig) -> int:
  """Returns the FLOPs of a token's attention to SEQUENCE_LENGTH positions."""
  # Two products forward, q k^T and weights v, and four backward; a multiply-add
  # counts as 2. The half that the causal mask hides counts too, so that figures
  # compare between programs.
  head_dims = config.num_layers * config.num_heads * config.d_kv
  return 12 * head_dims * config.sequence_length


def train_flops_per_token(config: PalmConfig) -> int:
  """Returns the FLOPs of a token's forward and backward pass."""
  # 2 N forward and 4 N backward in the products with N parameters. Activations
  # that REMAT computes again do not count: MFU is of the model's own FLOPs.
  return 6 * count_parameters(config) + attention_flops_per_token(config)


def mfu(
  tokens_per_sec: float, config: PalmConfig, peak_flops_per_sec: float
) -> float:
  """Returns the model FLOPs utilization, 1.0 at the peak.

  Args:
    tokens_per_sec: tokens a second of all chips together.
    config: architecture.
    peak_flops_per_sec: peak of all chips together, FLOP/s (hardware.py).
  """
  return tokens_per_sec * train_flops_per_token(config) / peak_flops_per_sec
