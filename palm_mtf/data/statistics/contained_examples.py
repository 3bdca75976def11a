# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Documents that contain examples of an evaluation set, and which they contain.

A document contains an example when at least 70% of the example's 8-grams, of
the words of its inputs and then of its text, occur in the document, however
long the document is. Examples of fewer than 8 words have no 8-gram: nothing
contains them. Memory: 32 bytes an 8-gram, of which the search needs 8.
"""

from collections.abc import Iterable

import numpy as np

from palm_mtf.data.sources.document import Document
from palm_mtf.data.statistics.contamination import MIN_SHARE, NGRAM_WORDS
from palm_mtf.data.statistics.ngrams import (
  find_hashes,
  hash_document,
  hash_ngrams,
)


class ContainedExamples:
  """The 8-grams of evaluation examples."""

  def __init__(self, examples: Iterable[Document]):
    """Reads the examples once."""
    ngrams = [np.empty(0, np.uint64)]  # for there may be no example
    ngrams += [hash_ngrams(hash_document(x), NGRAM_WORDS) for x in examples]
    self._counts = np.array([len(each) for each in ngrams], np.int64)
    self.num_examples = len(ngrams) - 1
    self.num_short = int((self._counts == 0).sum()) - 1  # of fewer than 8 words
    # The different 8-grams, sorted, which `find_ngrams` looks for.
    self.table, index = np.unique(np.concatenate(ngrams), return_inverse=True)
    # The examples of each of them, joined, and where they begin.
    by_ngram = np.argsort(index, kind="stable")
    self._owners = np.repeat(np.arange(len(ngrams)), self._counts)[by_ngram]
    self._starts = np.searchsorted(
      index[by_ngram], np.arange(len(self.table) + 1)
    )

  def any_in(self, found: np.ndarray) -> bool:
    """Returns whether a document contains an example.

    Args:
      found: indices of the document's 8-grams in `table`, [found], each once.
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
    return shares[1:] >= MIN_SHARE  # the first holds no example


def find_ngrams(table: np.ndarray, document: Document) -> np.ndarray:
  """Returns the indices of a document's 8-grams in `table`, each once, sorted.

  Args:
    table: hashes of 8-grams, sorted, [ngrams], uint64.
    document: a document.
  """
  ngrams = hash_ngrams(hash_document(document), NGRAM_WORDS)
  return np.unique(find_hashes(table, ngrams))
