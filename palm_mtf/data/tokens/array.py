# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The tokens of one split: arrays on disk, mapped, read like one array."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Shard(NamedTuple):
  """Whole documents, joined."""

  tokens: np.ndarray  # [num_tokens], uint16 or uint32; [eod] ends each document
  # Where in `tokens` the targets of each example begin, and where they end,
  # [2, num_documents], int64; None for documents, of which all is learnt.
  examples: np.ndarray | None = None


class TokenArray:
  """Shards read as one array of tokens."""

  def __init__(self, shards: Sequence[Shard]):
    """Joins `shards`, in their order."""
    self._shards = [shard for shard in shards if len(shard.tokens)]
    lengths = [len(shard.tokens) for shard in self._shards]
    self._starts = np.cumsum([0, *lengths])  # of each shard, and the end

  def __len__(self) -> int:
    return int(self._starts[-1])

  @property
  def has_inputs(self) -> bool:
    """Whether the documents are examples, of which targets alone are learnt."""
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
      # The disk is read here: pages of this part alone.
      part = shard.tokens[first : first + len(tokens) - done]
      tokens[done : done + len(part)] = part
      if shard.examples is not None:
        is_target[done : done + len(part)] = _is_target(
          shard.examples, first, first + len(part)
        )
      done += len(part)
      number += 1
    return tokens, is_target

  def spans(self, eod_id: int) -> np.ndarray:
    """Returns where each document is, in 24 bytes of memory for each.

    Returns:
      [num_documents, 3], int64: where a document begins, where its targets
      begin, and where it ends, behind its [eod].
    """
    spans = []
    for shard, start in zip(self._shards, self._starts, strict=False):
      if shard.examples is None:
        ends = np.flatnonzero(shard.tokens == eod_id) + 1
        begins = targets = np.concatenate([[0], ends[:-1]])
      else:  # a text of ids may hold [eod]
        targets, ends = shard.examples
        begins = np.concatenate([[0], ends[:-1]])
      spans.append(np.stack([begins, targets, ends], axis=1) + start)
    return np.concatenate(spans) if spans else np.empty([0, 3], np.int64)


def _is_target(examples: np.ndarray, start: int, stop: int) -> np.ndarray:
  targets, ends = examples
  # Examples that reach into start .. stop - 1: the first that ends behind
  # `start`, to the last whose targets begin before `stop`.
  first = int(np.searchsorted(ends, start, side="right"))
  last = int(np.searchsorted(targets, stop, side="left"))
  is_target = np.zeros(stop - start, bool)
  for begin, end in zip(targets[first:last], ends[first:last], strict=True):
    is_target[max(begin - start, 0) : end - start] = True
  return is_target
