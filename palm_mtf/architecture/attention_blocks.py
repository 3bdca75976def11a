# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""How attention cuts a sequence into blocks of queries."""

import functools
from typing import NamedTuple

# On CPUs without a C++ compiler, blocks of 128 positions are the fastest
# (`python -m tools.bench attention` at commit 45f2ee92). Each block is compiled
# separately, so sequences of more than _LONG positions have fewer and larger
# blocks, to limit compilation time.
_SMALL, _LARGE, _LONG = 128, 512, 2048


class AttentionBlock(NamedTuple):
  """A range of queries, and the range of keys that these queries read."""

  begin: int  # first query
  end: int  # first query after the block
  first_key: int
  end_key: int  # first key after the range

  @property
  def num_keys(self) -> int:
    """Number of keys that the queries read."""
    return self.end_key - self.first_key


@functools.cache  # because a search over layouts makes thousands of calls
def attention_blocks(
  length: int, has_prefix: bool = False, window: int | None = None
) -> tuple[AttentionBlock, ...]:
  """Splits a sequence into blocks, so that a block skips keys hidden from it.

  The causal mask hides the keys after a block; a window also hides keys far
  before the block. In a prefix LM (`has_prefix`), a block reads all keys,
  because the prefix may continue after the block.
  """
  size = _SMALL if length <= _LONG else _LARGE
  return tuple(
    AttentionBlock(
      begin,
      end,
      first_key=max(0, begin + 1 - window) if window else 0,
      end_key=length if has_prefix else end,
    )
    for begin in range(0, length, size)
    for end in [min(begin + size, length)]
  )


@functools.cache
def block_pairs(
  length: int, has_prefix: bool = False, window: int | None = None
) -> tuple[int, ...]:
  """Returns the number of query-key pairs per block, for FLOPs and memory."""
  blocks = attention_blocks(length, has_prefix, window)
  return tuple((x.end - x.begin) * x.num_keys for x in blocks)
