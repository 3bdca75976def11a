# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The tokens of one split: arrays on disk, mapped, read like one array."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Shard(NamedTuple):
  """Whole documents, joined."""

  tokens: np.ndarray  # [num_tokens], uint16 or uint32; [eod] ends each document
  # Where in `tokens` the targets of each document begin, and where it ends,
  # behind its [eod], [2, num_documents], int64.
  documents: np.ndarray
  has_inputs: bool = False  # whether documents are examples: targets are learnt


class TokenArray:
  """Shards read as one array of tokens."""

  def __init__(self, shards: Sequence[Shard]):
    """Joins `shards`, in their order."""
    self._shards = [shard for shard in shards if len(shard.tokens)]
    lengths = [len(shard.tokens) for shard in self._shards]
    self._starts = np.cumsum([0, *lengths])  # of each shard, and the end
    counts = [shard.documents.shape[1] for shard in self._shards]
    self._first_documents = np.cumsum([0, *counts])  # and the end

  def __len__(self) -> int:
    return int(self._starts[-1])

  @property
  def has_inputs(self) -> bool:
    """Whether the documents are examples, of which targets alone are learnt."""
    return any(shard.has_inputs for shard in self._shards)

  @property
  def num_documents(self) -> int:
    """Documents of all shards, repeats included."""
    return int(self._first_documents[-1])

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
      if shard.has_inputs:
        is_target[done : done + len(part)] = _is_target(
          shard.documents, first, first + len(part)
        )
      done += len(part)
      number += 1
    return tokens, is_target

  def extents(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns where documents begin, and where they end, behind their [eod].

    Args:
      documents: numbers of documents, in any order, [n], int64.

    Returns:
      Two arrays [n], int64.
    """
    begins, ends = np.empty_like(documents), np.empty_like(documents)
    shards = np.searchsorted(self._first_documents, documents, "right") - 1
    # Sorted by shard, so that each shard's array is read once.
    order = np.argsort(shards, kind="stable")
    for number, mine in _runs(shards[order]):
      mine = order[mine]
      local = documents[mine] - self._first_documents[number]
      end = self._shards[number].documents[1]
      begins[mine] = np.where(local > 0, end[local - 1], 0)
      begins[mine] += self._starts[number]
      ends[mine] = end[local] + self._starts[number]
    return begins, ends

  def spans(self) -> np.ndarray:
    """Returns where every document is, in 24 bytes of memory for each.

    Returns:
      [num_documents, 3], int64: where a document begins, where its targets
      begin, and where it ends, behind its [eod].
    """
    spans = []
    for shard, start in zip(self._shards, self._starts, strict=False):
      targets, ends = shard.documents
      begins = np.concatenate([[0], ends[:-1]])
      spans.append(np.stack([begins, targets, ends], axis=1) + start)
    return np.concatenate(spans) if spans else np.empty([0, 3], np.int64)


def _runs(values: np.ndarray) -> Iterator[tuple[int, slice]]:
  """Yields the value and the place of every run of equal values."""
  edges = np.flatnonzero(np.diff(values)) + 1
  for first, stop in itertools.pairwise([0, *edges.tolist(), len(values)]):
    if first < stop:
      yield int(values[first]), slice(first, stop)


def _is_target(documents: np.ndarray, start: int, stop: int) -> np.ndarray:
  targets, ends = documents
  # Examples that reach into start .. stop - 1: the first that ends behind
  # `start`, to the last whose targets begin before `stop`.
  first = int(np.searchsorted(ends, start, side="right"))
  last = int(np.searchsorted(targets, stop, side="left"))
  is_target = np.zeros(stop - start, bool)
  for begin, end in zip(targets[first:last], ends[first:last], strict=True):
    is_target[max(begin - start, 0) : end - start] = True
  return is_target
