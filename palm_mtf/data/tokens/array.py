# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The tokens of one split: many arrays on disk that read like one.

The arrays are shards, mapped, so that memory does not grow with them. A shard
of examples also says where the targets of each begin, because only they are
learnt.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Shard(NamedTuple):
  """Whole documents, joined.

  Attributes:
    tokens: [num_tokens], uint16 or uint32; each document ends with [eod].
    examples: [2, num_documents], int64: where in `tokens` the targets of each
      begin, and where they end; None for documents, which are all target.
  """

  tokens: np.ndarray
  examples: np.ndarray | None = None


class TokenArray:
  """Shards read as one array of tokens."""

  def __init__(self, shards: Sequence[Shard]):
    """Joins `shards`, in their order."""
    self._shards = [shard for shard in shards if len(shard.tokens)]
    lengths = [len(shard.tokens) for shard in self._shards]
    self._starts = np.cumsum([0, *lengths])

  def __len__(self) -> int:
    return int(self._starts[-1])

  @property
  def has_inputs(self) -> bool:
    """Whether the documents are examples, of which only a part is learnt."""
    return any(shard.examples is not None for shard in self._shards)

  def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens from `start` to before `stop`, across shards.

    Returns:
      tokens: [stop - start], int32.
      is_target: [stop - start], bool: whether each token is learnt.
    """
    tokens = np.empty(stop - start, np.int32)
    is_target = np.ones(stop - start, bool)
    number = int(np.searchsorted(self._starts, start, side="right")) - 1
    done = 0
    while done < len(tokens):
      shard, first = self._shards[number], start + done - self._starts[number]
      part = shard.tokens[first : first + len(tokens) - done]
      tokens[done : done + len(part)] = part
      if shard.examples is not None:
        is_target[done : done + len(part)] = _is_target(
          shard.examples, first, first + len(part)
        )
      done += len(part)
      number += 1
    return tokens, is_target

  def blocks(self, block_tokens: int = 1 << 20) -> Iterator[np.ndarray]:
    """Yields all tokens, in order, some at a time."""
    for shard in self._shards:
      for start in range(0, len(shard.tokens), block_tokens):
        yield shard.tokens[start : start + block_tokens]

  def spans(self, eod_id: int) -> np.ndarray:
    """Returns where each document is, in memory: 24 bytes a document.

    Returns:
      [num_documents, 3], int64: where it begins, where its targets begin, and
      where it ends, behind its [eod].
    """
    spans = []
    for shard, start in zip(self._shards, self._starts, strict=False):
      if shard.examples is None:
        ends = np.flatnonzero(shard.tokens == eod_id) + 1
        begins = np.concatenate([[0], ends[:-1]])
        parts = [begins, begins, ends]
      else:
        targets, ends = shard.examples
        parts = [np.concatenate([[0], ends[:-1]]), targets, ends]
      spans.append(np.stack(parts, axis=1) + start)
    return np.concatenate(spans) if spans else np.empty([0, 3], np.int64)


def _is_target(examples: np.ndarray, start: int, stop: int) -> np.ndarray:
  """Says of the tokens from `start` to `stop` which belong to targets."""
  targets, ends = examples
  first = int(np.searchsorted(ends, start, side="right"))
  last = int(np.searchsorted(targets, stop, side="left"))
  is_target = np.zeros(stop - start, bool)
  for begin, end in zip(targets[first:last], ends[first:last], strict=True):
    is_target[max(begin - start, 0) : end - start] = True
  return is_target
