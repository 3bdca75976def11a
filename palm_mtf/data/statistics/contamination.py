# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""How much of an evaluation set is in the training text, as PaLM 8 measured it.

An example is contaminated when at least 70% of its 8-grams occur in the
training text. PaLM does not say what a gram is: here it is a word, in lower
case, as in ngrams.py, and the words of an example are those of its inputs and
then of its text. An example of fewer than 8 words is one n-gram of all its
words, so that it is contaminated when the training text has it whole; these are
counted apart, because a word or two always occurs. One without words never is.

The n-grams of the examples are kept, and the training text streams past them:
memory does not grow with it. At most 2 ** 21 n-grams are kept, about 13 MB of
text, in some 65 bytes each; of a larger evaluation set those examples are
judged whose hashes are smallest: a fair sample, the same in any order.
"""

import dataclasses
import heapq

import numpy as np

from palm_mtf.data.sources.document import Document
from palm_mtf.data.statistics.ngrams import hash_document, hash_ngrams

NGRAM_WORDS = 8
MIN_SHARE = 0.7
_MAX_NGRAMS = 1 << 21


@dataclasses.dataclass(frozen=True)
class Contamination:
  """What of an evaluation set the training text has.

  Attributes:
    examples: in the evaluation set.
    judged: held-out documents whose n-grams were looked for: all, or a sample.
    short: judged documents with fewer than 8 words.
    contaminated: judged documents with 70% of their n-grams or more in the
      training text.
    contaminated_short: contaminated documents with fewer than 8 words.
    ngram_share: share of the n-grams of all the judged in the training text.
  """

  examples: int
  judged: int
  short: int
  contaminated: int
  contaminated_short: int
  ngram_share: float


class Examples:
  """The n-grams of an evaluation set, or of a fair sample of it.

  Attributes:
    count: examples added.
  """

  def __init__(self, max_ngrams: int = _MAX_NGRAMS):
    """Keeps `max_ngrams` n-grams at most, but one example in any case."""
    self.count = 0
    self._max_ngrams = max_ngrams
    self._num_ngrams = 0
    # A heap of (-rank, number, words, n-grams): the largest rank comes first.
    self._kept: list[tuple[float, int, int, np.ndarray]] = []
    self._limit = 2.0  # examples of this rank and above do not fit

  def add(self, example: Document) -> None:
    """Adds one example."""
    self.count += 1
    if example.rank >= self._limit:
      return
    words = hash_document(example)
    ngrams = hash_ngrams(words, max(1, min(NGRAM_WORDS, len(words))))
    item = (-example.rank, self.count, len(words), ngrams)
    heapq.heappush(self._kept, item)
    self._num_ngrams += len(ngrams)
    while self._num_ngrams > self._max_ngrams and len(self._kept) > 1:
      rank, _, _, ngrams = heapq.heappop(self._kept)
      self._num_ngrams -= len(ngrams)
      self._limit = min(self._limit, -rank)

  def kept(self) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns words of each example, [judged], int64, and its n-grams."""
    words = np.array([words for _, _, words, _ in self._kept], np.int64)
    return words, [ngrams for _, _, _, ngrams in self._kept]


class Overlap:
  """Looks for the n-grams of an evaluation set in the training text."""

  def __init__(self, examples: Examples):
    """Takes `examples`, to which nothing is added any more."""
    self._num_examples = examples.count
    self._words, ngrams = examples.kept()
    self._counts = np.array([len(each) for each in ngrams], np.int64)
    # Sorted, each once, and which of them stands at each place.
    self._ngrams, self._places = np.unique(
      np.concatenate([np.empty(0, np.uint64), *ngrams]), return_inverse=True
    )
    self._found = np.zeros(len(self._ngrams), bool)
    lengths = np.minimum(self._words, NGRAM_WORDS)
    self._lengths = np.unique(lengths[lengths > 0]).tolist()

  def add(self, document: Document) -> None:
    """Looks for the n-grams in one training document."""
    if not self._lengths:
      return
    words = hash_document(document)
    for n in self._lengths:
      ngrams = np.sort(hash_ngrams(words, n))  # four times as fast to look up
      places = np.searchsorted(self._ngrams, ngrams)
      places[places == len(self._ngrams)] = 0
      self._found[places[self._ngrams[places] == ngrams]] = True

  def result(self) -> Contamination:
    """Returns what the documents added so far have of the examples."""
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
