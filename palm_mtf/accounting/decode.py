# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What one more token of every row reads, and how many threads that is for."""

import math

from palm_mtf.accounting.params import parameter_shapes
from palm_mtf.config.model import PalmConfig
from palm_mtf.config.parameter_names import parsed

# A thread reads so many bytes in some 0.2 ms. To share fewer of them with
# another core costs more, in waiting for it, than the other core takes over:
# measured by tools/bench_decode.py on two cores.
_BYTES_FOR_A_THREAD = 4_000_000

_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


def decode_weight_bytes(config: PalmConfig, weight_dtype: str) -> int:
  """Returns the bytes of all weights, each of which a token reads once.

  Args:
    config: the architecture.
    weight_dtype: WEIGHT_DTYPE; norms and embedding are never int8.
  """
  kernels = "int8" if weight_dtype == "int8" else config.activation_dtype
  total = 0
  for name, shape in parameter_shapes(config).items():
    dtype = kernels if parsed(name).is_kernel else config.activation_dtype
    total += math.prod(shape) * _BYTES[dtype]
  return total


def step_threads(config: PalmConfig, weight_dtype: str, cores: int) -> int:
  """Returns how many threads should share the products of one token's step.

  Args:
    config: the architecture.
    weight_dtype: WEIGHT_DTYPE.
    cores: that there are.

  Returns:
    1 to `cores`: as many as the weights of a product are worth.
  """
  products_a_layer = 2 if config.block == "parallel" else 4
  products = products_a_layer * config.num_layers + 1
  mean = decode_weight_bytes(config, weight_dtype) / products
  return max(1, min(cores, int(mean / _BYTES_FOR_A_THREAD)))
