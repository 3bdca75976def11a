# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluation examples in training text, found by 8-grams (PaLM, section 8).

PaLM does not say what a gram is: here it is a word (ngrams.py). An example is
its inputs followed by its text. Two classes answer two questions:

ContaminationSearch: which examples are contaminated? At least 70% of such an
example's 8-grams occur anywhere in the training text.

ContainedExamples: does a document contain any example, and which examples does
a text contain? At least 70% of such an example's 8-grams occur in the document
or text, however long it is. An example of fewer than 8 words has no 8-gram, so
nothing contains it. Memory: 24 bytes per 8-gram, 8 of them in `table`.
"""

import dataclasses
import heapq
from collections.abc import Iterable

import numpy as np

from palm_mtf.data.sources.document import Document
from palm_mtf.data.statistics.ngrams import (
  find_hashes,
  hash_document,
  hash_ngrams,
)

NGRAM_WORDS = 8
MIN_SHARE = 0.7
_MAX_NGRAMS = 1 << 21  # as in 13 MB of text; 65 bytes of memory per n-gram


@dataclasses.dataclass(frozen=True)
class Contamination:
  """How many examples an evaluation set has, and how many are contaminated."""

  examples: int
  judged: int  # examples whose n-grams were looked for: all, or a sample
  # `judged` examples of fewer than 8 words, counted separately because short
  # examples often occur in the training text by chance.
  short: int
  contaminated: int
  contaminated_short: int
  ngram_share: float  # share of `judged` examples' n-grams that was found


class Examples:
  """The n-grams of an evaluation set, or of a random sample of its examples."""

  def __init__(self, max_ngrams: int = _MAX_NGRAMS):
    """Keeps at most `max_ngrams` n-grams, but at least one example."""
    self.count = 0  # number of examples added
    self._max_ngrams = max_ngrams
    self._num_ngrams = 0
    # A heap of (-rank, number of the example, number of words, hashes of
    # n-grams). The lowest ranks are kept, so that the order of examples has no
    # effect.
    self.kept: list[tuple[float, int, int, np.ndarray]] = []
    self._limit = 2.0  # examples of this rank or above do not fit

  def add(self, example: Document) -> None:
    """Adds one example."""
    self.count += 1
    if example.rank >= self._limit:
      return
    words = hash_document(example)
    # An example of fewer than 8 words has one n-gram, with all its words. An
    # example without words has no n-gram, and is never contaminated.
    ngrams = hash_ngrams(words, max(1, min(NGRAM_WORDS, len(words))))
    item = (-example.rank, self.count, len(words), ngrams)
    heapq.heappush(self.kept, item)
    self._num_ngrams += len(ngrams)
    while self._num_ngrams > self._max_ngrams and len(self.kept) > 1:
      rank, _, _, ngrams = heapq.heappop(self.kept)
      self._num_ngrams -= len(ngrams)
      self._limit = min(self._limit, -rank)


class ContaminationSearch:
  """A search for the n-grams of an evaluation set in the training text.

  Memory does not grow with the training text.
  """

  def __init__(self, examples: Examples):
    """Takes `examples`, to which no example may be added afterwards."""
    self._num_examples = examples.count
    self._words = np.array([words for _, _, words, _ in examples.kept], int)
    ngrams = [ngrams for _, _, _, ngrams in examples.kept]
    self._counts = np.array([len(each) for each in ngrams], np.int64)
    # _ngrams: distinct and sorted. _ngrams[_places]: all examples' n-grams.
    self._ngrams, self._places = np.unique(
      np.concatenate([np.empty(0, np.uint64), *ngrams]), return_inverse=True
    )
    self._found = np.zeros(len(self._ngrams), bool)
    lengths = np.minimum(self._words, NGRAM_WORDS)
    self._lengths = np.unique(lengths[lengths > 0]).tolist()

  def add(self, document: Document) -> None:
    """Looks for the evaluation set's n-grams in one training document."""
    if not self._lengths:
      return
    words = hash_document(document)
    for n in self._lengths:
      self._found[find_hashes(self._ngrams, hash_ngrams(words, n))] = True

  def result(self) -> Contamination:
    """Returns how many examples the added documents contaminate."""
    found = self._found[self._places]
    ends = np.cumsum(self._counts)
    hits = np.concatenate([[0], np.cumsum(found)])
    shares = np.diff(hits[[0, *ends]]) / np.maximum(1, self._counts)
    contaminated = shares >= MIN_SHARE
    short = self._words < NGRAM_WORDS
    return Contamination(
      examples=self._num_examples,
      judged=len(self._words),
      short=int(short.sum()),
      contaminated=int(contaminated.sum()),
      contaminated_short=int((contaminated & short).sum()),
      ngram_share=float(found.sum() / max(1, len(found))),
    )


class ContainedExamples:
  """Finds evaluation examples in documents and texts by their 8-grams."""

  def __init__(self, examples: Iterable[Document]):
    ngrams = [np.empty(0, np.uint64)]  # no example: concatenate needs an array
    ngrams += [hash_ngrams(hash_document(x), NGRAM_WORDS) for x in examples]
    self._counts = np.array([len(each) for each in ngrams], np.int64)
    self.num_examples = len(ngrams) - 1
    self.num_short = int((self._counts == 0).sum()) - 1  # of fewer than 8 words
    # The distinct 8-grams, sorted, which `find_ngrams` looks up.
    self.table, index = np.unique(np.concatenate(ngrams), return_inverse=True)
    # _owners[_starts[i] : _starts[i + 1]]: the examples with 8-gram table[i].
    by_ngram = np.argsort(index, kind="stable")
    self._owners = np.repeat(np.arange(len(ngrams)), self._counts)[by_ngram]
    self._starts = np.searchsorted(
      index[by_ngram], np.arange(len(self.table) + 1)
    )

  def any_in(self, found: np.ndarray) -> bool:
    """Returns whether a document contains an example.

    Args:
      found: distinct indices of the document's 8-grams in `table`, [found].
    """
    if not len(found):
      return False
    spans = zip(self._starts[found], self._starts[found + 1], strict=True)
    owners = np.concatenate([self._owners[a:b] for a, b in spans])
    examples, hits = np.unique(owners, return_counts=True)
    return bool((hits / self._counts[examples] >= MIN_SHARE).any())

  def contained(self, found: np.ndarray) -> np.ndarray:
    """Returns which examples a text contains, [examples], bool.

    Args:
      found: whether the text has each 8-gram of `table`, [ngrams], bool.
    """
    hits = np.bincount(
      self._owners,
      np.repeat(found, np.diff(self._starts)),
      minlength=len(self._counts),
    )
    shares = hits / np.maximum(1, self._counts)
    return shares[1:] >= MIN_SHARE  # entry 0 is no example


def find_ngrams(table: np.ndarray, document: Document) -> np.ndarray:
  """Returns the indices in `table` of a document's 8-grams: distinct, sorted.

  Args:
    table: hashes of 8-grams, distinct, sorted, [ngrams], uint64.
  """
  ngrams = hash_ngrams(hash_document(document), NGRAM_WORDS)
  return np.unique(find_hashes(table, ngrams))
