# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a token reads, and the threads that this is worth."""

import dataclasses

import pytest

from palm_mtf.accounting.decode import (
  cache_bytes_per_token,
  decode_weight_bytes,
  step_threads,
)
from palm_mtf.accounting.params import count_norm_scales, count_parameters
from tests.accounting.published_sizes import PALM_8B, PALM_62B, PALM_540B

# 26.6M parameters: products of 1.9M weights.
SMALL = dataclasses.replace(PALM_8B, num_layers=6, d_model=512, num_heads=8)
SMALL = dataclasses.replace(SMALL, d_kv=64, d_ff=2048, vocab_size=8192)


def test_a_token_reads_every_weight_once():
  config = dataclasses.replace(SMALL, activation_dtype="bfloat16")
  table, scales = config.vocab_size * config.d_model, count_norm_scales(config)
  kernels = count_parameters(config) - table
  # Logits read the table as int8; norm scales are not quantized.
  rest = table + 2 * scales
  assert decode_weight_bytes(config, "int8") == kernels + rest
  # Of 32 numbers of 4 bits, a scale of 2 bytes.
  assert decode_weight_bytes(config, "int4") == kernels * 18 // 32 + rest
  every = kernels + table + scales
  assert decode_weight_bytes(config, "activation") == 2 * every
  config = dataclasses.replace(SMALL, activation_dtype="float32")
  assert decode_weight_bytes(config, "activation") == 4 * every


@pytest.mark.parametrize(
  ("config", "dtype", "weight_dtype", "cores", "threads"),
  [
    (SMALL, "bfloat16", "int8", 16, 1),
    (SMALL, "bfloat16", "activation", 16, 1),
    (SMALL, "float32", "activation", 16, 2),
    (PALM_8B, "bfloat16", "int8", 16, 16),
    (PALM_8B, "bfloat16", "int8", 2, 2),
  ],
)
def test_few_bytes_are_read_by_one_thread_and_many_by_all_cores(
  config, dtype, weight_dtype, cores, threads
):
  config = dataclasses.replace(config, activation_dtype=dtype)
  assert step_threads(config, weight_dtype, cores) == threads


# Worked out from the sizes of Table 1: one head of 256 keys and one of values.
@pytest.mark.parametrize(
  ("config", "kibibytes", "of_all_heads"),
  [(PALM_8B, 32, 512), (PALM_62B, 64, 2048), (PALM_540B, 118, 5664)],
)
def test_a_token_keeps_one_head_a_layer_and_not_all(
  config, kibibytes, of_all_heads
):
  assert cache_bytes_per_token(config) == kibibytes * 1024
  every = dataclasses.replace(config, attention="multi_head")
  assert cache_bytes_per_token(every) == of_all_heads * 1024
