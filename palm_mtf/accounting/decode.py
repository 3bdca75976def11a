# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes that decoding reads and keeps, and the threads that they are worth."""

import math

from palm_mtf.accounting.optimizer_state import DTYPE_BYTES
from palm_mtf.accounting.params import distinct_parameters
from palm_mtf.config.model import PalmConfig
from palm_mtf.config.parameter_names import parsed

# A thread reads so many bytes in some 0.2 ms. To share fewer of them with
# another core costs more, in waiting for it, than the other core takes over:
# measured by tools/bench_decode.py on two cores.
_BYTES_FOR_A_THREAD = 4_000_000

# Of 4 bits, 32 numbers share a scale of 2 bytes.
_QUANTIZED_BYTES = {"int8": 1, "int4": 0.5 + 2 / 32}


def decode_weight_bytes(config: PalmConfig, weight_dtype: str) -> int:
  """Returns the bytes of all weights, which a decoding step reads once."""
  is_quantized = weight_dtype != "activation"
  total = 0
  for name, shape, n in distinct_parameters(config):
    dtype = weight_dtype if parsed(name).is_kernel else "activation"
    if name == "embedding" and is_quantized:
      dtype = "int8"  # as logits read it (generation/decode/weights.py)
    width = _QUANTIZED_BYTES.get(dtype, DTYPE_BYTES[config.activation_dtype])
    total += int(math.prod(shape) * width) * n
  return total


def cache_bytes_per_token(config: PalmConfig) -> int:
  """Returns the bytes of a token's keys and values in all layers."""
  heads = config.num_heads if config.attention == "multi_head" else 1
  width = DTYPE_BYTES[config.activation_dtype]
  return 2 * config.num_layers * heads * config.d_kv * width


def step_threads(config: PalmConfig, weight_dtype: str, cores: int) -> int:
  """Returns the number of threads for the products of a decoding step.

  Args:
    config: architecture.
    weight_dtype: WEIGHT_DTYPE.
    cores: number of cores, the most threads.
  """
  # A parallel block has two products, [q k v wi_gate wi] and [o wo], a serial
  # block four. One more gives the logits.
  products_a_layer = 2 if config.block == "parallel" else 4
  products = products_a_layer * config.num_layers + 1
  mean = decode_weight_bytes(config, weight_dtype) / products
  return max(1, min(cores, int(mean / _BYTES_FOR_A_THREAD)))
