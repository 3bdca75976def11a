# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The decision which documents are removed, in one pass over all sources.

Filters apply in the order of REASONS, and a document counts under the first
that removes it: none is a duplicate of one that another filter removes. Memory:
a byte for each document; 25 more where duplicates are removed.
"""

from array import array
from collections.abc import Sequence

import numpy as np

from palm_mtf.config.filters import FilterConfig
from palm_mtf.console import progress_bar
from palm_mtf.data.filters.duplicates import DIGEST_BYTES, Candidates, repeats
from palm_mtf.data.sources.document import VALIDATION, Document, Source

# A decision is an index into these names; 0 keeps the document.
REASONS = ("", "low_quality", "too_short", "too_long", "exact_duplicates")
_EXACT = REASONS.index("exact_duplicates")


def decide(
  sources: Sequence[Source], filters: FilterConfig
) -> list[np.ndarray]:
  """Returns the decisions on the documents of each source, [documents], uint8.

  Args:
    sources: sources of a run, without filters.
    filters: filters of the run.

  Raises:
    UserError: as the sources do.
  """
  measured = [_Measured() for _ in sources]
  for source, each in zip(sources, measured, strict=True):
    with progress_bar(f"Filtering {source.name}", source.num_bytes) as advance:
      for split, document in source.documents():
        each.add(split, document, filters)
        advance(document.num_bytes)
  decisions = [np.frombuffer(each.decisions, np.uint8) for each in measured]
  if filters.remove_duplicates:
    exact = repeats([each.candidates() for each in measured])
    for decided, mine in zip(decisions, exact, strict=True):
      decided[np.flatnonzero(decided == 0)[mine]] = _EXACT
  return decisions


def count_removed(decisions: np.ndarray) -> dict[str, int]:
  """Returns "documents_read", and "removed_too_short" and so on."""
  counts = np.bincount(decisions, minlength=len(REASONS)).tolist()
  removed = [f"removed_{reason}" for reason in REASONS[1:]]
  return {
    "documents_read": len(decisions),
    **dict(zip(removed, counts[1:], strict=True)),
  }


class _Measured:
  """Decisions on single documents of a source, and what duplicates need."""

  def __init__(self):
    self.decisions = bytearray()
    self._digests = bytearray()
    self._weights = array("d")
    self._held_out = bytearray()

  def add(self, split: str, document: Document, filters: FilterConfig) -> None:
    reason = _reason(document, filters)
    self.decisions.append(REASONS.index(reason))
    if filters.remove_duplicates and not reason:
      self._digests += document.digest(DIGEST_BYTES)
      self._weights.append(document.weight)
      self._held_out.append(split == VALIDATION)

  def candidates(self) -> Candidates:
    return Candidates(
      digests=np.frombuffer(self._digests, np.uint64).reshape(-1, 2),
      weights=np.frombuffer(self._weights, np.float64),
      held_out=np.frombuffer(self._held_out, np.bool_),
    )


def _reason(document: Document, filters: FilterConfig) -> str:
  """Returns why a document is removed, whatever the others are, or ""."""
  lowest, longest = filters.min_quality, filters.max_document_bytes
  if lowest is not None and document.quality < lowest:
    return "low_quality"
  num_bytes = document.num_bytes
  if num_bytes < filters.min_document_bytes:
    return "too_short"
  if longest is not None and num_bytes > longest:
    return "too_long"
  return ""
