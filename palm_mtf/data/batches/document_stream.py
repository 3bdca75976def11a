# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The documents of all sources, shuffled and mixed, in one endless stream.

The stream is cut into blocks. A block takes documents of each source, in that
source's order (document_order.py), until the source has its share of all tokens
so far, and mixes them as if cards were shuffled:

  rates 0.5, 0.5    documents of a    5 3 1 | 4 0 2 ...
                    documents of b    1 0 | 2 ...
  block 0 | 1       a5 b1 a3 a1 b0 | b2 a4 ...

So every source has its rate of tokens in every block, to within a document.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf.data.batches.document_order import DocumentOrder
from palm_mtf.data.batches.shuffle import shuffle
from palm_mtf.data.tokens.array import TokenArray

# Tokens of a block at most: 32,768 rows of 2,048, 16 batches of PaLM's largest.
# The documents of a block, some ten thousands, are listed in memory.
_BLOCK_TOKENS = 1 << 26
_RATE_UNITS = 10**9  # rates as whole numbers: positions are exact at any step


class TokenSource(NamedTuple):
  """The documents of one source and its share of all tokens."""

  name: str
  rate: float
  tokens: TokenArray


class Stretch(NamedTuple):
  """Tokens of one document that follow one another in the stream."""

  source: int  # its place among the sources
  epoch: int
  document: int
  begin: int  # place of the first token in its document
  start: int  # place of the first token among the tokens of its source
  length: int


class _Block(NamedTuple):
  """The documents of a block in the order of the stream, each array [n]."""

  begins: np.ndarray  # positions in the stream, and the block's end, [n + 1]
  sources: np.ndarray
  epochs: np.ndarray
  documents: np.ndarray
  starts: np.ndarray  # places among the tokens of the source


class DocumentStream:
  """An endless stream of tokens: documents of all sources in a keyed order."""

  def __init__(self, sources: Sequence[TokenSource], *, seed: int):
    """Mixes sources by their rates, all positive."""
    self._tokens = [source.tokens for source in sources]
    self._orders = [
      DocumentOrder(source.tokens, f"seed {seed} source {source.name}")
      for source in sources
    ]
    self._weights = _whole_rates([source.rate for source in sources])
    self._seed = seed
    self._num_tokens = sum(map(len, self._tokens))
    # Blocks in as many tokens as all sources have. Blocks of a single source
    # end where its epochs end.
    self._num_blocks = -(-self._num_tokens // _BLOCK_TOKENS)
    # A row may reach into the next block.
    self._starts = functools.lru_cache(maxsize=8)(self._find_starts)
    self._block = functools.lru_cache(maxsize=3)(self._make_block)

  def stretches(self, begin: int, stop: int) -> list[Stretch]:
    """Returns what stands from position `begin` to before `stop`."""
    found = []
    number = self.block_at(begin)
    while begin < stop:
      block = self._block(number)
      at = int(np.searchsorted(block.begins, begin, side="right")) - 1
      while begin < stop and at < len(block.documents):
        end = min(stop, int(block.begins[at + 1]))
        inside = begin - int(block.begins[at])
        found.append(
          Stretch(
            source=int(block.sources[at]),
            epoch=int(block.epochs[at]),
            document=int(block.documents[at]),
            begin=inside,
            start=int(block.starts[at]) + inside,
            length=end - begin,
          )
        )
        begin, at = end, at + 1
      number += 1
    return found

  def block_at(self, position: int) -> int:
    """Returns the number of the block that holds `position`."""
    # A source begins a block where a document begins, at its share of tokens or
    # later: the search goes back from the last block that may begin here.
    after = position + len(self._tokens)
    block = after * self._num_blocks // self._num_tokens + 1
    while self.start_of(block) > position:
      block -= 1
    return block

  def start_of(self, block: int) -> int:
    """Returns the position where a block begins."""
    return sum(position for _, position in self._starts(block))

  def _find_starts(self, block: int) -> list[tuple[int, int]]:
    """Returns, by source, the first number of a block and its position."""
    tokens = block * self._num_tokens
    return [
      order.first_from(tokens * weight // (self._num_blocks * _RATE_UNITS))
      for order, weight in zip(self._orders, self._weights, strict=True)
    ]

  def _make_block(self, block: int) -> _Block:
    ends = zip(self._starts(block), self._starts(block + 1), strict=True)
    spans = [(first, stop) for (first, _), (stop, _) in ends]
    counts = [stop - first for first, stop in spans]
    size = sum(counts)
    # Cards, as many of each source as its documents, tell the order of sources;
    # each source's documents stay in the source's own order.
    key = f"seed {self._seed} mixture block {block}"
    cards = shuffle(np.arange(size), max(1, size), key)
    sources = np.searchsorted(np.cumsum(counts), cards, side="right")
    documents, epochs, starts, lengths = np.empty([4, size], np.int64)
    for source, (first, stop) in enumerate(spans):
      order, mine = self._orders[source], sources == source
      documents[mine] = order.documents(first, stop)
      epochs[mine] = np.arange(first, stop) // order.num_documents
      begins, ends = self._tokens[source].extents(documents[mine])
      starts[mine], lengths[mine] = begins, ends - begins
    begins = self.start_of(block) + np.concatenate([[0], np.cumsum(lengths)])
    return _Block(begins, sources, epochs, documents, starts)


def _whole_rates(rates: Sequence[float]) -> list[int]:
  """Returns rates as whole numbers, each at least 1, _RATE_UNITS in all."""
  total = sum(rates)
  units = [max(1, int(rate / total * _RATE_UNITS)) for rate in rates]
  units[int(np.argmax(units))] += _RATE_UNITS - sum(units)
  return units
