# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""FLOPs of training, and their share of the peak (PaLM Appendix B)."""

import math

from palm_mtf.accounting.params import count_parameters, parameter_shapes
from palm_mtf.config.model import PalmConfig
from palm_mtf.config.parameter_names import parsed


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


def hfu(
  tokens_per_sec: float, config: PalmConfig, peak_flops_per_sec: float
) -> float:
  """Returns the hardware FLOPs utilization: REMAT's repeated FLOPs count too.

  Args:
    tokens_per_sec: tokens a second of all chips together.
    config: architecture.
    peak_flops_per_sec: peak of all chips together, FLOP/s (hardware.py).
  """
  flops = train_flops_per_token(config) + recomputed_flops_per_token(config)
  return tokens_per_sec * flops / peak_flops_per_sec


def recomputed_flops_per_token(config: PalmConfig) -> int:
  """Returns the FLOPs that a token's backward pass repeats, by REMAT."""
  if config.remat == "none":
    return 0
  # Of attention's six products the two forward ones.
  attention = attention_flops_per_token(config) // 3
  if config.remat == "attention":
    return attention
  # The last product of a branch is not repeated: nothing reads its result. The
  # serial form's MLP starts from what attention's last product gives.
  unused = {"mlp/wo"} if config.block == "serial" else {"attention/o", "mlp/wo"}
  repeated = sum(
    math.prod(shape)
    for name, shape in parameter_shapes(config).items()
    if parsed(name).is_kernel and parsed(name).part not in unused
  )
  return attention + 2 * repeated
