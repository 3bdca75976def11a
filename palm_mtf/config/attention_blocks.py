# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of positions that attend one after another."""

# On CPUs blocks of 128 are the fastest (tools/bench_attention.py). Long
# sequences have fewer and larger ones: each is compiled for its own shapes.
_SMALL, _LARGE, _LONG = 128, 512, 2048


def attention_blocks(length: int) -> list[tuple[int, int]]:
  """Returns the first position of each block and the first behind it.

  Args:
    length: positions of a sequence.
  """
  size = _SMALL if length <= _LONG else _LARGE
  return [(x, min(x + size, length)) for x in range(0, length, size)]


def attention_pairs(length: int) -> int:
  """Returns how many pairs of query and key are computed in a sequence.

  A block meets the keys up to its own end: of what the causal mask hides, no
  more than half a block's square.
  """
  return sum((end - begin) * end for begin, end in attention_blocks(length))


def largest_block_pairs(length: int) -> int:
  """Returns how many pairs of query and key the largest block has."""
  return max((end - begin) * end for begin, end in attention_blocks(length))
