# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What filters need of documents that takes time, by worker processes."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf.data.sources.document import Document
from palm_mtf.data.statistics.contamination import find_ngrams
from palm_mtf.data.statistics.near_duplicates import minhash, text_digest
from palm_mtf.data.worker_pool import WorkerPool

_BATCH_CHARACTERS = 1 << 18
_DOCUMENT_CHARACTERS = 256  # memory of a document beside its text


def in_batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
  """Yields batches of documents that are worth handing to a worker process."""
  batch: list[Document] = []
  size = 0
  for document in documents:
    batch.append(document)
    size += len(document.text) + _DOCUMENT_CHARACTERS
    if size >= _BATCH_CHARACTERS:
      yield batch
      batch, size = [], 0
  if batch:
    yield batch


class Measures(NamedTuple):
  """Measures of a batch of documents."""

  digests: list[bytes]  # 16 bytes of each document; [] without duplicates
  values: list[bytes]  # MinHash values, uint16, of each; [] without near ones
  # Indices in the table of the 8-grams of each; [] without a table.
  ngrams: list[np.ndarray]


class Measurer(NamedTuple):
  """A function of batches of documents.

  Attributes:
    duplicates: whether duplicates are looked for.
    near: whether near duplicates are.
    table: 8-grams of evaluation examples (contamination.py), or None.
  """

  duplicates: bool
  near: bool
  table: np.ndarray | None

  def __call__(self, batch: Sequence[Document]) -> Measures:
    """Returns the measures of the documents of a batch."""
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
    measurer: measurements that the workers make.
    num_processes: number of workers; one a core by default, 0 for none.
  """
  return WorkerPool(
    measurer,
    functools.partial(Measurer, *measurer),
    when_killed="a process that compares documents was killed, as happens when "
    "memory runs out; free some and start again.",
    num_processes=num_processes,
  )
