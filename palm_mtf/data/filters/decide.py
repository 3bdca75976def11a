# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Decides which documents filters remove, in one pass over all sources.

Filters apply in the order of REASONS, "by_attributes" first, and a document
counts under the first filter that removes it. So the search for duplicates
ignores documents that other filters remove. Memory per document is 1 byte, plus
10 for contamination or duplicates, plus 16 for exact duplicates or 272 for near
duplicates. The peak is 100 bytes to sort exact duplicates, or up to 1,200 to
group near duplicates.
"""

import functools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf.config.data import NEAR, FilterConfig
from palm_mtf.data.ngrams import (
  NUM_VALUES,
  ContainedExamples,
  begins_run,
  find_ngrams,
  group_similar,
  minhash,
)
from palm_mtf.data.sources.document import (
  VALIDATION,
  Document,
  Source,
  read_with_progress,
)
from palm_mtf.data.worker_pool import WorkerPool, gather
from palm_mtf.errors import UserError

# Why filters remove documents. A decision is an index into REASONS; 0: keep.
REASONS = (
  "",
  "low_quality",
  "too_short",
  "too_long",
  "contaminated",
  "exact_duplicates",
  "near_duplicates",
  "by_attributes",  # applies first; decisions on disk have the other indices
)
_CONTAMINATED = REASONS.index("contaminated")
_EXACT, _NEAR = map(REASONS.index, ("exact_duplicates", "near_duplicates"))
# Characters of text per batch of a worker: enough that workers spend more time
# on hashing text than on receiving it.
_BATCH_CHARACTERS = 1 << 18


def decide(
  sources: Sequence[Source],
  filters: FilterConfig,
  examples: ContainedExamples | None = None,
  num_processes: int | None = None,
) -> list[np.ndarray]:
  """Returns each source's decisions on its documents, [documents], uint8.

  A decision is an index into REASONS; 0 keeps the document. If `examples` are
  given, documents that contain any of them are removed. By default there is a
  worker process per core.

  Raises UserError if a source cannot be read, or a worker process was killed.
  """
  duplicates = filters.remove_duplicates
  if duplicates != NEAR and not examples:
    num_processes = 0  # no workers: sending a text is slower than hashing it
  columns = [_Columns(filters, examples) for _ in sources]
  with MeasuringPool(duplicates, examples, num_processes) as pool:
    for source, mine in zip(sources, columns, strict=True):
      for measures in pool.measure(mine.measured(source)):
        mine.extend(measures)
  decisions = [each.decisions() for each in columns]
  if duplicates:
    repeats = find_repeats([each.candidates() for each in columns])
    for decided, repeat in zip(decisions, repeats, strict=True):
      decided[decided == 0] = repeat
  return decisions


def count_removed(decisions: np.ndarray) -> dict[str, int]:
  """Counts documents: {"documents_read": n, "removed_<reason>": n, ...}."""
  counts = np.bincount(decisions, minlength=len(REASONS)).tolist()
  removed = zip(REASONS[1:], counts[1:], strict=True)
  return {
    "documents_read": len(decisions),
    **{f"removed_{reason}": count for reason, count in removed},
  }


class Measures(NamedTuple):
  """What a worker computes per document of a batch; [] for what is not used."""

  digests: list[bytes]  # 16-byte hashes, which find equal texts
  values: list[bytes]  # uint16 MinHash values, which find near duplicates
  ngrams: list[np.ndarray]  # indices of 8-grams in `ContainedExamples.table`


class MeasuringPool(WorkerPool):
  """Workers that compute hashes and 8-grams by which documents are compared."""

  def __init__(
    self,
    remove_duplicates: str | None,
    examples: ContainedExamples | None,
    num_processes: int | None = None,
  ):
    """Prepares workers: one per core by default; 0 measures in this process.

    Workers compute digests unless REMOVE_DUPLICATES is None, MinHash values if
    REMOVE_DUPLICATES is "near", and 8-grams if `examples` is not None.
    """
    table = examples.table if examples else None
    super().__init__(
      functools.partial(_measure, remove_duplicates, table),
      when_killed="a process that compares documents was killed, as happens "
      "when memory runs out; free some and start again.",
      num_processes=num_processes,
    )

  def measure(self, documents: Iterable[Document]) -> Iterator[Measures]:
    """Yields what workers computed from each batch of documents, in order."""
    # Count 256 characters more per document, for the memory of its objects.
    batches = gather(documents, lambda x: len(x.text) + 256, _BATCH_CHARACTERS)
    return self.map(batches)


def _measure(
  remove_duplicates: str | None,
  table: np.ndarray | None,
  batch: Sequence[Document],
) -> Measures:
  digests, values, ngrams = [], [], []
  for document in batch:
    if remove_duplicates:
      digests.append(document.digest())
    if remove_duplicates == NEAR:
      values.append(minhash(document, digests[-1]).tobytes())
    if table is not None:
      ngrams.append(find_ngrams(table, document))
  return Measures(digests, values, ngrams)


class _Columns:
  """Decisions on a source's documents, and hashes for the duplicate search."""

  def __init__(self, filters: FilterConfig, examples: ContainedExamples | None):
    self._filters, self._examples = filters, examples
    self._is_measured = examples is not None or filters.remove_duplicates
    self._decisions = bytearray()
    # These have an item per document that quality and size do not remove:
    self._weights, self._held_out = array("d"), bytearray()
    self._contaminated = bytearray()
    self._digests, self._values = bytearray(), bytearray()

  def measured(self, source: Source) -> Iterator[Document]:
    """Filters by quality and size; yields the documents that workers hash."""
    for split, document in read_with_progress(source, "Filtering"):
      reason = _find_reason(document, self._filters)
      self._decisions.append(REASONS.index(reason))
      if self._is_measured and not reason:
        if self._examples is not None and not isinstance(document.text, str):
          raise UserError(
            f"DECONTAMINATE_TASKS: {source.name} makes token ids, which cannot "
            "be compared with the text of examples; let its steps end in "
            "`tokenize`, or remove no contaminated documents."
          )
        self._weights.append(document.weight)
        self._held_out.append(split == VALIDATION)
        yield document

  def extend(self, measures: Measures) -> None:
    self._digests += b"".join(measures.digests)
    self._values += b"".join(measures.values)
    if self._examples is not None:
      self._contaminated += bytes(map(self._examples.any_in, measures.ngrams))

  def decisions(self) -> np.ndarray:
    """Returns the decisions before duplicates are found, [documents], uint8."""
    decisions = np.frombuffer(self._decisions, np.uint8)
    if self._examples is not None:
      contaminated = np.frombuffer(self._contaminated, np.uint8)
      decisions[decisions == 0] = contaminated * _CONTAMINATED
    return decisions

  def candidates(self) -> list[np.ndarray]:
    """Returns columns of the documents among which duplicates are sought.

    The columns are digests, [documents, 2], uint64; MinHash values, [documents,
    128], uint16 ([documents, 0] if near duplicates are not removed); weights,
    [documents], float64; and whether held out, [documents], bool.
    """
    near = NUM_VALUES if self._filters.remove_duplicates == NEAR else 0
    values = np.frombuffer(self._values, np.uint16)
    columns = [
      np.frombuffer(self._digests, np.uint64).reshape(-1, 2),
      values.reshape(len(self._weights), near),
      np.frombuffer(self._weights, np.float64),
      np.frombuffer(self._held_out, np.bool_),
    ]
    if self._examples is None:
      return columns
    clean = np.frombuffer(self._contaminated, np.uint8) == 0
    return [column[clean] for column in columns]


def _find_reason(document: Document, filters: FilterConfig) -> str:
  if document.is_excluded:
    return "by_attributes"
  num_bytes = document.num_bytes
  lowest, longest = filters.min_quality, filters.max_document_bytes
  if lowest is not None and document.quality < lowest:
    return "low_quality"
  if num_bytes < filters.min_document_bytes:
    return "too_short"
  if longest is not None and num_bytes > longest:
    return "too_long"
  return ""


def find_repeats(sources: Sequence[list[np.ndarray]]) -> list[np.ndarray]:
  """Finds the documents that duplicate a kept document.

  `sources` are the results of `_Columns.candidates`.

  Documents with the same text are sorted by split (held-out first), then by
  source, then by weight (greatest first); the first document is kept. Near
  duplicates are sorted by source, then by the hash of the text; the first
  document is kept. Both orders put documents of weight 0 last, because training
  never reads them. The result depends neither on the order of files nor on the
  number of processes.

  Returns an array per source, [documents], uint8: the index of
  "exact_duplicates" or "near_duplicates" in REASONS, or 0 for a kept document.
  """
  counts = [len(digests) for digests, *_ in sources]
  digests, values, weights, held_out = map(
    np.concatenate, zip(*sources, strict=True)
  )
  source = np.repeat(np.arange(len(sources)), counts)
  # Sort equal texts together. Among equal texts, put the one to keep first.
  unread = weights == 0
  order = np.lexsort((-weights, source, ~held_out, unread, *digests.T))
  is_first = begins_run(digests[order])
  repeats = np.full(len(order), _EXACT, np.uint8)
  texts = order[is_first]  # one document per different text, sorted by hash
  repeats[texts] = 0
  if values.shape[1]:
    # A group keeps its first text. Do not put held-out texts first: training
    # would lose every such group, and a large group probably has one.
    groups = group_similar(values[texts])
    by_group = np.lexsort(
      (np.arange(len(texts)), source[texts], unread[texts], groups)
    )
    is_later = ~begins_run(groups[by_group, np.newaxis])
    repeats[texts[by_group[is_later]]] = _NEAR
  return np.split(repeats, np.cumsum(counts)[:-1])
