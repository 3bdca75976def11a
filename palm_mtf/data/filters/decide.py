# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Decides which documents filters remove, in one pass over all sources.

Filters apply in the order of REASONS, and a document counts under the first
filter that removes it. So the search for duplicates ignores documents that
other filters remove. Memory per document is 1 byte, plus 10 for contamination
or duplicates, plus 16 for exact duplicates or 272 for near duplicates. The peak
is 100 bytes to sort exact duplicates, or up to 1,200 to group near duplicates.
"""

import itertools
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf.config.data import NEAR, FilterConfig
from palm_mtf.console import progress_bar
from palm_mtf.data.filters.measure import (
  Measurer,
  Measures,
  gather_documents,
  measuring_pool,
)
from palm_mtf.data.sources.document import VALIDATION, Document, Source
from palm_mtf.data.statistics.contamination import ContainedExamples
from palm_mtf.data.statistics.near_duplicates import NUM_VALUES, group_similar
from palm_mtf.errors import UserError

# A decision is an index into these names; 0 keeps the document.
REASONS = (
  "",
  "low_quality",
  "too_short",
  "too_long",
  "contaminated",
  "exact_duplicates",
  "near_duplicates",
)
_CONTAMINATED = REASONS.index("contaminated")
_EXACT, _NEAR = map(REASONS.index, ("exact_duplicates", "near_duplicates"))


def decide(
  sources: Sequence[Source],
  filters: FilterConfig,
  examples: ContainedExamples | None = None,
  num_processes: int | None = None,
) -> list[np.ndarray]:
  """Returns each source's decisions on its documents, [documents], uint8.

  A decision is an index into REASONS; 0 keeps the document.

  Args:
    examples: evaluation examples that no document may contain.
    num_processes: number of worker processes; one per core by default.

  Raises:
    UserError: a source cannot be read, or a worker process was killed.
  """
  measurer = Measurer(
    duplicates=filters.remove_duplicates is not None,
    near=filters.remove_duplicates == NEAR,
    table=examples.table if examples else None,
  )
  if not measurer.near and not examples:
    num_processes = 0  # hashing a text is faster than sending it to a worker
  columns = [_Columns(filters, examples) for _ in sources]
  with measuring_pool(measurer, num_processes) as pool:
    for source, mine in zip(sources, columns, strict=True):
      for measures in pool.map(gather_documents(mine.measured(source))):
        mine.extend(measures)
  decisions = [each.decisions() for each in columns]
  if filters.remove_duplicates:
    repeats = find_repeats([each.candidates() for each in columns])
    for decided, repeat in zip(decisions, repeats, strict=True):
      decided[decided == 0] = repeat
  return decisions


def count_removed(decisions: np.ndarray) -> dict[str, int]:
  """Returns counts: "documents_read", and "removed_<reason>" per reason."""
  counts = np.bincount(decisions, minlength=len(REASONS)).tolist()
  removed = [f"removed_{reason}" for reason in REASONS[1:]]
  return {
    "documents_read": len(decisions),
    **dict(zip(removed, counts[1:], strict=True)),
  }


class Candidates(NamedTuple):
  """A source's documents that all filters but deduplication keep, in order."""

  digests: np.ndarray  # hashes of inputs and text, [documents, 2], uint64
  # MinHash values, [documents, 128], uint16; [documents, 0] if near duplicates
  # are not removed.
  values: np.ndarray
  weights: np.ndarray  # [documents], float64
  held_out: np.ndarray  # [documents], bool


class _Columns:
  """Decisions on one source's documents, and measures of the kept documents."""

  def __init__(self, filters: FilterConfig, examples: ContainedExamples | None):
    self._filters, self._examples = filters, examples
    self._is_measured = examples is not None or filters.remove_duplicates
    self._decisions = bytearray()
    # One entry per measured document:
    self._weights, self._held_out = array("d"), bytearray()
    self._contaminated = bytearray()
    # One entry per measured document that contains no evaluation example:
    self._digests, self._values = bytearray(), bytearray()

  def measured(self, source: Source) -> Iterator[Document]:
    """Filters by quality and size; yields the documents to measure."""
    with progress_bar(f"Filtering {source.name}", source.num_bytes) as advance:
      for split, document in source.documents():
        num_bytes = document.num_bytes
        advance(num_bytes)
        reason = _find_reason(document, num_bytes, self._filters)
        self._decisions.append(REASONS.index(reason))
        if self._is_measured and not reason:
          if self._examples is not None and not isinstance(document.text, str):
            raise UserError(
              f"DECONTAMINATE_TASKS: {source.name} makes token ids, which "
              "cannot be compared with the text of examples; let its steps end "
              "in `tokenize`, or remove no contaminated documents."
            )
          self._weights.append(document.weight)
          self._held_out.append(split == VALIDATION)
          yield document

  def extend(self, measures: Measures) -> None:
    digests, values = measures.digests, measures.values
    if self._examples is not None:
      contaminated = [self._examples.any_in(x) for x in measures.ngrams]
      self._contaminated += bytes(contaminated)
      clean = [not each for each in contaminated]
      digests = itertools.compress(digests, clean)
      values = itertools.compress(values, clean)
    self._digests += b"".join(digests)
    self._values += b"".join(values)

  def decisions(self) -> np.ndarray:
    """Returns the decisions before duplicates are found, [documents], uint8."""
    decisions = np.frombuffer(self._decisions, np.uint8)
    if self._examples is not None:
      contaminated = np.frombuffer(self._contaminated, np.uint8)
      decisions[decisions == 0] = contaminated * _CONTAMINATED
    return decisions

  def candidates(self) -> Candidates:
    """Returns the documents that all filters but deduplication keep."""
    weights = np.frombuffer(self._weights, np.float64)
    held_out = np.frombuffer(self._held_out, np.bool_)
    if self._examples is not None:
      clean = np.frombuffer(self._contaminated, np.uint8) == 0
      weights, held_out = weights[clean], held_out[clean]
    near = NUM_VALUES if self._filters.remove_duplicates == NEAR else 0
    values = np.frombuffer(self._values, np.uint16)
    return Candidates(
      digests=np.frombuffer(self._digests, np.uint64).reshape(-1, 2),
      values=values.reshape(len(weights), near),
      weights=weights,
      held_out=held_out,
    )


def _find_reason(
  document: Document, num_bytes: int, filters: FilterConfig
) -> str:
  """Returns why quality or size removes a document; "" if neither does."""
  lowest, longest = filters.min_quality, filters.max_document_bytes
  if lowest is not None and document.quality < lowest:
    return "low_quality"
  if num_bytes < filters.min_document_bytes:
    return "too_short"
  if longest is not None and num_bytes > longest:
    return "too_long"
  return ""


def find_repeats(sources: Sequence[Candidates]) -> list[np.ndarray]:
  """Finds the documents that duplicate a kept document.

  Documents with the same text are sorted by split (held-out first), then by
  source, then by weight (greatest first); the first document is kept. Near
  duplicates are sorted by source, then by the hash of the text; the first
  document is kept. Both orders put documents of weight 0 last, because training
  never reads them. The result depends neither on the order of files nor on the
  number of processes.

  Returns:
    An array per source, [documents], uint8: the index of "exact_duplicates" or
    "near_duplicates" in REASONS, or 0 for a document that is kept.
  """
  counts = [len(each.weights) for each in sources]
  digests, values, weights, held_out = map(
    np.concatenate, zip(*sources, strict=True)
  )
  source = np.repeat(np.arange(len(sources)), counts)
  # Sort by text, then in the order of the docstring.
  unread = weights == 0
  order = np.lexsort((-weights, source, ~held_out, unread, *digests.T))
  is_first = _begins_run(digests[order])
  repeats = np.full(len(order), _EXACT, np.uint8)
  texts = order[is_first]  # one document per text, sorted by hash
  repeats[texts] = 0
  if values.shape[1]:
    # Do not put held-out texts first here. Otherwise training would lose every
    # group with a held-out text, and a large group probably has one.
    groups = group_similar(values[texts])
    by_group = np.lexsort(
      (np.arange(len(texts)), source[texts], unread[texts], groups)
    )
    is_later = ~_begins_run(groups[by_group, np.newaxis])
    repeats[texts[by_group[is_later]]] = _NEAR
  return np.split(repeats, np.cumsum(counts)[:-1])


def _begins_run(rows: np.ndarray) -> np.ndarray:
  """Returns whether each row differs from the row before, [rows], bool."""
  begins = np.ones(len(rows), bool)
  begins[1:] = (rows[1:] != rows[:-1]).any(axis=1)
  return begins
