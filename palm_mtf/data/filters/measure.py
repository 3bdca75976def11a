# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Computes hashes and n-grams of documents for filters, in worker processes."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf.data.sources.document import Document
from palm_mtf.data.statistics.contamination import find_ngrams
from palm_mtf.data.statistics.near_duplicates import minhash, text_digest
from palm_mtf.data.worker_pool import WorkerPool, gather

_BATCH_CHARACTERS = 1 << 18
_DOCUMENT_CHARACTERS = 256  # added per document, for memory besides the text


def gather_documents(documents: Iterable[Document]) -> Iterator[list[Document]]:
  """Yields batches large enough to be worth sending to a worker process."""
  return gather(
    documents, lambda x: len(x.text) + _DOCUMENT_CHARACTERS, _BATCH_CHARACTERS
  )


class Measures(NamedTuple):
  """A batch's measures: lists with an entry per document, or [] if unneeded."""

  digests: list[bytes]  # 16 bytes each
  values: list[bytes]  # MinHash values, uint16
  ngrams: list[np.ndarray]  # indices of 8-grams in `Measurer.table`


class Measurer(NamedTuple):
  """A function that computes the `Measures` of a batch of documents.

  Attributes:
    duplicates: whether to compute digests.
    near: whether to compute MinHash values too.
    table: `ContainedExamples.table`, the evaluation examples' 8-grams; or None.
  """

  duplicates: bool
  near: bool
  table: np.ndarray | None

  def __call__(self, batch: Sequence[Document]) -> Measures:
    """Returns the measures of a batch."""
    digests, values, ngrams = [], [], []
    for document in batch:
      if self.duplicates:
        digests.append(text_digest(document))
      if self.near:
        values.append(minhash(document, digests[-1]).tobytes())
      if self.table is not None:
        ngrams.append(find_ngrams(self.table, document))
    return Measures(digests, values, ngrams)


def measuring_pool(
  measurer: Measurer, num_processes: int | None = None
) -> WorkerPool:
  """Returns a pool of worker processes that measure batches of documents.

  Args:
    num_processes: number of workers; one per core by default, 0 for none.
  """
  return WorkerPool(
    measurer,
    functools.partial(Measurer, *measurer),
    when_killed="a process that compares documents was killed, as happens when "
    "memory runs out; free some and start again.",
    num_processes=num_processes,
  )
