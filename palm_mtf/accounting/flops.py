# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of training, and the share of the peak they reach.

One multiply-add counts as 2. A token costs 6 N in the products with the N
parameters: 2 N forward and 4 N backward (PaLM Appendix B). Attention over
`sequence_length` positions adds 12 num_layers heads d_kv sequence_length: two
products forward, four backward. Neither the half that the causal mask hides nor
recomputed activations are discounted, so that figures compare between programs.

Model FLOPs utilization (MFU) is the rate of these operations over the peak of
all chips together; peaks are in hardware.py. Hardware FLOPs utilization (HFU)
counts what REMAT computes again besides: two products of attention, and for
"layer" those with all parameters but the last of each branch.
"""

import math

from palm_mtf.accounting.params import count_parameters, parameter_shapes
from palm_mtf.config.model import PalmConfig
from palm_mtf.config.parameter_names import parsed


def product_flops_per_token(num_parameters: int) -> int:
  """Returns the FLOPs of a token's products with the parameters."""
  return 6 * num_parameters


def attention_flops_per_token(
  *, num_layers: int, num_heads: int, d_kv: int, sequence_length: int
) -> int:
  """Returns the FLOPs of a token's attention to `sequence_length` positions."""
  return 12 * num_layers * num_heads * d_kv * sequence_length


def train_flops_per_token(config: PalmConfig) -> int:
  """Returns the FLOPs of one token's forward and backward pass."""
  return product_flops_per_token(
    count_parameters(config)
  ) + attention_flops_per_token(
    num_layers=config.num_layers,
    num_heads=config.num_heads,
    d_kv=config.d_kv,
    sequence_length=config.sequence_length,
  )


def mfu(
  tokens_per_sec: float, config: PalmConfig, peak_flops_per_sec: float
) -> float:
  """Returns the model FLOPs utilization, 1.0 at the peak.

  Args:
    tokens_per_sec: observed, over all chips.
    config: the architecture.
    peak_flops_per_sec: the peak of all chips together, FLOP/s.
  """
  return tokens_per_sec * train_flops_per_token(config) / peak_flops_per_sec


def recomputed_flops_per_token(config: PalmConfig) -> int:
  """Returns the FLOPs that a token's backward pass repeats, by REMAT."""
  if config.remat == "none":
    return 0
  attention = attention_flops_per_token(
    num_layers=config.num_layers,
    num_heads=config.num_heads,
    d_kv=config.d_kv,
    sequence_length=config.sequence_length,
  )
  if config.remat == "attention":
    return attention // 3
  # The serial form's MLP starts from what attention's last product gives.
  unused = {"mlp/wo"} if config.block == "serial" else {"attention/o", "mlp/wo"}
  repeated = sum(
    math.prod(shape)
    for name, shape in parameter_shapes(config).items()
    if parsed(name).is_kernel and parsed(name).part not in unused
  )
  return attention // 3 + 2 * repeated


def hfu(
  tokens_per_sec: float, config: PalmConfig, peak_flops_per_sec: float
) -> float:
  """Returns the hardware FLOPs utilization; the arguments are as in `mfu`."""
  flops = train_flops_per_token(config) + recomputed_flops_per_token(config)
  return tokens_per_sec * flops / peak_flops_per_sec
