# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of positions that attend one after another."""

import functools

# On CPUs without a C++ compiler, blocks of 128 are the fastest
# (tools/bench_attention.py). Long sequences have fewer and larger ones: each is
# compiled for its own shapes.
_SMALL, _LARGE, _LONG = 128, 512, 2048


def attention_blocks(length: int) -> list[tuple[int, int]]:
  """Returns the first position of each block and the first behind it.

  Args:
    length: positions of a sequence.
  """
  size = _SMALL if length <= _LONG else _LARGE
  return [(x, min(x + size, length)) for x in range(0, length, size)]


def num_keys(end: int, length: int, has_prefix: bool) -> int:
  """Returns how many keys a block meets, from the first position on.

  Those up to its own end: of what the causal mask hides, no more than half a
  block's square is computed. A prefix may lie behind it.

  Args:
    end: first position behind the block.
    length: positions of a sequence.
    has_prefix: whether inputs attend to one another in both directions.
  """
  return length if has_prefix else end


def attention_pairs(length: int, has_prefix: bool = False) -> int:
  """Returns how many pairs of query and key are computed in a sequence."""
  return sum(_block_pairs(length, has_prefix))


def largest_block_pairs(length: int, has_prefix: bool = False) -> int:
  """Returns how many pairs of query and key the largest block has."""
  return max(_block_pairs(length, has_prefix))


@functools.cache  # a search over layouts asks many thousand times
def _block_pairs(length: int, has_prefix: bool) -> list[int]:
  return [
    (end - begin) * num_keys(end, length, has_prefix)
    for begin, end in attention_blocks(length)
  ]
