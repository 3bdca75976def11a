# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Streams of training rows: joined documents, or rows of whole documents.

Rows of PACKING "joined" are cut from one endless stream of documents. As in
PaLM (section 5), documents are shuffled, mixed and joined, then cut into rows,
so that a row's documents come from anywhere. Three classes do this:

DocumentOrder shuffles the documents of one source, differently in each epoch:

  number     0 1 2 3 4 | 5 6 7 ...     five documents per epoch
  epoch              0 | 1
  document   3 0 4 2 1 | 1 4 0 ...
  position   0 7 9 ...                 tokens before the document, since epoch 0

DocumentStream mixes the sources in blocks. A block takes documents from each
source, in that source's order, until the source has its share of all tokens so
far. A block's documents are shuffled, but each source keeps its order:

  rates 0.5, 0.5    documents of a    5 3 1 | 4 0 2 ...
                    documents of b    1 0 | 2 ...
  blocks 0 | 1      a5 b1 a3 a1 b0 | b2 a4 ...

JoinedStream cuts the stream into rows, and shuffles the rows of each block, so
that the hundred rows of a book are not in one batch.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf.data.batches.neighbours import NeighbourIndex
from palm_mtf.data.batches.packing import (
  FEATURES,
  JoinedRows,
  Piece,
  Row,
  WholeRows,
  join_features,
  make_joined_row,
)
from palm_mtf.data.batches.shuffle import shuffle, shuffle_epochs
from palm_mtf.data.tokens.shard import TokenArray

_STRIDE = 256  # to save memory, only every 256th document's position is kept
_CHUNK = 1 << 20  # documents whose lengths are read at once, to limit memory
# Documents are shuffled in blocks of at most about this many tokens, which are
# 16 of PaLM's largest batches. A block takes 40 bytes of memory per document.
_BLOCK_TOKENS = 1 << 26
# Rates are integers in units of 1e-9, because floats would round a position in
# the stream (a number of tokens times a rate) when training is long.
_RATE_UNITS = 10**9


class DocumentOrder:
  """The endless order in which the documents of one source are read.

  A document's number is its index in this order. A position is a number of
  tokens from the start of this order.
  """

  def __init__(self, tokens: TokenArray, key: str):
    """Shuffles the documents of `tokens` (at least one) with the seed `key`."""
    self._tokens = tokens
    self._key = key
    self.num_documents = tokens.num_documents  # per epoch
    self.num_tokens = len(tokens)  # per epoch
    # Cache two epochs: a block of the stream may reach into the next epoch.
    self._sparse = functools.lru_cache(maxsize=2)(self._sparse_positions)

  def documents(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the epochs and the indices of documents `first` to `stop` - 1.

    `first` and `stop` are document numbers. The indices are those in `tokens`.
    """
    numbers = np.arange(first, stop)
    return shuffle_epochs(numbers, self.num_documents, self._key)

  def first_from(self, position: int) -> tuple[int, int]:
    """Returns the first document that begins at or after `position`.

    The result is the document's number, and the position of its first token.
    """
    epoch, rest = divmod(position, self.num_tokens)
    sparse = self._sparse(epoch)
    group = int(np.searchsorted(sparse, rest, side="right")) - 1
    start = epoch * self.num_documents
    first = start + group * _STRIDE
    stop = min(first + _STRIDE, start + self.num_documents)
    lengths = self._lengths(first, stop)
    # Where these documents begin in the epoch, and where the last one ends.
    begins = sparse[group] + np.concatenate([[0], np.cumsum(lengths)])
    found = int(np.searchsorted(begins, rest, side="left"))
    return first + found, epoch * self.num_tokens + int(begins[found])

  def _lengths(self, first: int, stop: int) -> np.ndarray:
    _, documents = self.documents(first, stop)
    begins, ends = self._tokens.extents(documents)
    return ends - begins

  def _sparse_positions(self, epoch: int) -> np.ndarray:
    """Returns how many tokens of the epoch precede every 256th document."""
    # A document's position is the sum of all lengths before it, which takes a
    # pass over the epoch's lengths. Every 256th position is kept, which takes
    # 3 MB for 10**8 documents.
    start, sums = epoch * self.num_documents, []
    stop = start + self.num_documents
    for first in range(start, stop, _CHUNK):
      lengths = self._lengths(first, min(first + _CHUNK, stop))
      sums.append(np.add.reduceat(lengths, np.arange(0, len(lengths), _STRIDE)))
    return np.concatenate([[0], np.cumsum(np.concatenate(sums))[:-1]])


class TokenSource(NamedTuple):
  """The documents of one source, and the source's share of all tokens."""

  name: str
  rate: float
  tokens: TokenArray


class Stretch(NamedTuple):
  """Consecutive tokens of the stream that belong to one document."""

  source: int  # index of the source
  epoch: int
  document: int
  begin: int  # index of the stretch's first token in the document
  start: int  # index of that first token in the source's TokenArray
  length: int


class _Block(NamedTuple):
  """The n documents in a block of the stream; arrays are [n] by default."""

  begins: np.ndarray  # [n + 1]: positions in the stream, then the block's end
  sources: np.ndarray
  epochs: np.ndarray
  documents: np.ndarray
  starts: np.ndarray  # index of each first token in its source's TokenArray


class DocumentStream:
  """An endless stream of tokens: all sources' documents, shuffled by a seed."""

  def __init__(self, sources: Sequence[TokenSource], *, seed: int):
    """Mixes sources in proportion to their rates, which are positive."""
    self._tokens = [source.tokens for source in sources]
    self._orders = [
      DocumentOrder(source.tokens, f"seed {seed} source {source.name}")
      for source in sources
    ]
    self._weights = _whole_rates([source.rate for source in sources])
    self._seed = seed
    self._num_tokens = sum(map(len, self._tokens))
    # Divide `_num_tokens` tokens into a whole number of blocks, so that each
    # epoch ends where a block ends if there is only one source.
    self._num_blocks = -(-self._num_tokens // _BLOCK_TOKENS)
    # A row may reach into the next block, so cache several blocks.
    self._starts = functools.lru_cache(maxsize=8)(self._find_starts)
    self._block = functools.lru_cache(maxsize=3)(self._make_block)

  def stretches(self, begin: int, stop: int) -> list[Stretch]:
    """Returns the parts of documents at the positions `begin` to `stop` - 1."""
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
    # Block b begins near b * _num_tokens / _num_blocks: each source's share is
    # rounded down by less than a token, then up to the source's next document.
    # To find a block that is never too low, add a token per source to the
    # position. Then count down from this block.
    after = position + len(self._tokens)
    block = after * self._num_blocks // self._num_tokens + 1
    while self.start_of(block) > position:
      block -= 1
    return block

  def start_of(self, block: int) -> int:
    """Returns the position in the stream of a block's first token."""
    return sum(position for _, position in self._starts(block))

  def _find_starts(self, block: int) -> list[tuple[int, int]]:
    """Returns (number, position) of each source's first document in a block."""
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
    # Shuffle which source comes when, not the documents: the documents of one
    # source stay in that source's order.
    key = f"seed {self._seed} mixture block {block}"
    cards = shuffle(np.arange(size), max(1, size), key)
    sources = np.searchsorted(np.cumsum(counts), cards, side="right")
    documents, epochs, starts, lengths = np.empty([4, size], np.int64)
    for source, (first, stop) in enumerate(spans):
      order, mine = self._orders[source], sources == source
      epochs[mine], documents[mine] = order.documents(first, stop)
      begins, ends = self._tokens[source].extents(documents[mine])
      starts[mine], lengths[mine] = begins, ends - begins
    begins = self.start_of(block) + np.concatenate([[0], np.cumsum(lengths)])
    return _Block(begins, sources, epochs, documents, starts)


def _whole_rates(rates: Sequence[float]) -> list[int]:
  """Scales rates to integers, each at least 1, that sum to _RATE_UNITS."""
  total = sum(rates)
  units = [max(1, int(rate / total * _RATE_UNITS)) for rate in rates]
  units[int(np.argmax(units))] += _RATE_UNITS - sum(units)
  return units


class JoinedStream:
  """The training rows of a run, cut from shuffled, mixed and joined documents.

  A row depends only on its number, which counts from the start of the run.
  `num_rows` is the number of rows per epoch, summed over all sources.
  """

  def __init__(
    self,
    sources: Sequence[TokenSource],
    length: int,
    *,
    eod_id: int | None,
    seed: int,
    first: int = 0,
    neighbours: NeighbourIndex | None = None,
  ):
    """Cuts rows of `length` tokens; see `make_joined_row` for the rest."""
    self._sources = sources
    self._length = length
    self._eod_id, self._first = eod_id, first
    self._neighbours, self._seed = neighbours, seed
    self._stream = DocumentStream(sources, seed=seed)
    tokens = [source.tokens for source in sources]
    self.num_rows = sum(map(len, tokens)) // length
    self.features = join_features(tokens, eod_id, neighbours)

  def read(self, numbers: np.ndarray) -> list[Row]:
    """Returns the features of rows, given their numbers, [n], int64.

    A feature is [length], int32; "loss_weights" is float32.
    """
    rows, given = [], (self._eod_id, self._first, self._neighbours)
    for row in self._stretches(numbers):
      places = [
        (self._sources[x.source].tokens, x.start, x.start + x.length)
        for x in row
      ]
      rows.append(make_joined_row(places, self.features, *given))
    return rows

  def pieces(self, numbers: np.ndarray) -> list[list[Piece]]:
    """Returns which parts of documents each row has, for `data inspect`."""
    return [
      [
        Piece(
          self._sources[x.source].name, x.epoch, x.document, x.begin, x.length
        )
        for x in row
      ]
      for row in self._stretches(numbers)
    ]

  def _stretches(self, numbers: np.ndarray) -> list[list[Stretch]]:
    begins = self._shuffle_rows(numbers) * self._length
    return [
      self._stream.stretches(begin, begin + self._length)
      for begin in begins.tolist()
    ]

  def _shuffle_rows(self, numbers: np.ndarray) -> np.ndarray:
    """Converts row numbers in training order to row numbers in the stream."""
    places = np.empty_like(numbers)
    left = np.arange(len(numbers))
    while len(left):
      block = self._stream.block_at(int(numbers[left[0]]) * self._length)
      # Shuffle the rows that begin in this block; the last may end after it.
      first, stop = (
        -(-self._stream.start_of(x) // self._length) for x in (block, block + 1)
      )
      inside = (numbers[left] >= first) & (numbers[left] < stop)
      mine, left = left[inside], left[~inside]
      key = f"seed {self._seed} rows of block {block}"
      places[mine] = first + shuffle(numbers[mine] - first, stop - first, key)
    return places


BLOCK_ROWS = 10_000


class Mixture:
  """Decides from which source each row of a run comes."""

  def __init__(self, rates: Sequence[float], *, seed: int):
    """Divides every BLOCK_ROWS rows among sources in proportion to `rates`."""
    # Number of rows per source in every block, [sources], int64.
    self.rows_of_block = _apportion(np.asarray(rates, np.float64))
    self._seed = seed
    # Cache two blocks, because consecutive steps read the same blocks.
    self._block = functools.lru_cache(maxsize=2)(self._order_block)

  def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns each row's source (an index), and the row's number there.

    All arrays are [n], int64. `numbers` count the run's rows of all sources.
    The second result counts only the run's rows of the row's source.
    """
    # A source has equally many rows in every block, so a row's number in its
    # source is known without computing earlier blocks.
    if len(self.rows_of_block) == 1:
      return np.zeros_like(numbers), numbers
    blocks, places = np.divmod(numbers, BLOCK_ROWS)
    sources, index = np.empty_like(places), np.empty_like(places)
    for block in np.unique(blocks).tolist():
      inside = blocks == block
      order, ranks = self._block(block)
      sources[inside] = order[places[inside]]
      index[inside] = ranks[places[inside]]
    return sources, blocks * self.rows_of_block[sources] + index

  def _order_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns each row's source and how many earlier rows have this source."""
    ends = np.cumsum(self.rows_of_block)
    key = f"seed {self._seed} mixture block {block}"
    cards = shuffle(np.arange(BLOCK_ROWS), BLOCK_ROWS, key)
    sources = np.searchsorted(ends, cards, side="right")
    ranks = np.empty_like(sources)
    for source, count in enumerate(self.rows_of_block):
      ranks[sources == source] = np.arange(count)
    return sources, ranks


def _apportion(rates: np.ndarray) -> np.ndarray:
  """Divides BLOCK_ROWS in proportion to `rates`; returns rows per source."""
  # This is the largest remainder method, with at least one row per source.
  shares = rates / rates.sum() * BLOCK_ROWS
  counts = np.maximum(1, np.floor(shares)).astype(np.int64)
  # Round, because remainders that should be equal may differ in the last bits.
  order = np.argsort(-np.round(shares - counts, 9), kind="stable")
  missing = BLOCK_ROWS - counts.sum()
  if missing >= 0:
    counts[order[:missing]] += 1
  else:  # shares below 1 took a whole row, so the largest source gives up rows
    counts[np.argmax(counts)] += missing
  return counts


class RowSource(NamedTuple):
  """The rows of one source, and the source's share of all rows."""

  name: str
  rate: float
  rows: JoinedRows | WholeRows


class MixedRows:
  """The training rows of a run, which mix the WholeRows of several sources.

  Its attributes and methods are those of JoinedStream. Sources are mixed in
  blocks of 10,000 rows. In every block, each source has its exact share of
  rows, and the order of the sources is shuffled:

    rates 0.5, 0.3, 0.2 and blocks of 10    a a a a a b b b c c, shuffled
    number                0 1 2 3 4 5 6 7 8 9 | 10 11 ...
    source                b a c a a b a a c b |  a  c ...
    row of that source    0 0 0 1 2 1 3 4 1 2 |  5  2 ...

  The rows of a source are shuffled in each epoch. For a source of 5 rows:

    row of that source    0 1 2 3 4 | 5 6 7 8 9 | 10 11 ...
    epoch                         0 |         1 |         2
    row that is read      3 0 4 2 1 | 1 4 0 3 2 | ...
  """

  def __init__(self, sources: Sequence[RowSource], *, seed: int):
    self.sources = sources
    self._seed = seed
    self._mixture = Mixture([source.rate for source in sources], seed=seed)
    self.features = list_features(sources)
    self.num_rows = sum(source.rows.num_rows for source in sources)

  def read(self, numbers: np.ndarray) -> list[Row]:
    """Returns each row's features; see `JoinedStream.read`."""
    return [
      source.rows.read(row, epoch)
      for source, epoch, row in self._places(numbers)
    ]

  def pieces(self, numbers: np.ndarray) -> list[list[Piece]]:
    """Returns which parts of documents each row has, for `data inspect`."""
    return [
      [Piece(source.name, epoch, *piece) for piece in source.rows.pieces(row)]
      for source, epoch, row in self._places(numbers)
    ]

  def _places(
    self, numbers: np.ndarray
  ) -> Iterator[tuple[RowSource, int, int]]:
    """Yields (source, epoch, index of row in source) for each row number."""
    sources, index = self._mixture.locate(numbers)
    epochs, rows = np.empty_like(index), np.empty_like(index)
    for s in np.unique(sources):
      mine, source = sources == s, self.sources[s]
      key = f"seed {self._seed} source {source.name}"
      epochs[mine], rows[mine] = shuffle_epochs(
        index[mine], source.rows.num_rows, key
      )
    for s, epoch, row in zip(
      sources, epochs.tolist(), rows.tolist(), strict=True
    ):
      yield self.sources[s], epoch, row


def list_features(sources: Sequence[RowSource]) -> tuple[str, ...]:
  """Returns a batch's feature names: all that the rows of any source have."""
  held = {name for source in sources for name in source.rows.features}
  return tuple(name for name in FEATURES if name in held)
