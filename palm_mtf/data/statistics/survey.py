# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Statistics of a corpus and of each source, from two passes over all text."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from palm_mtf.data.sources.document import (
  TRAIN,
  VALIDATION,
  Document,
  Source,
  read_with_progress,
)
from palm_mtf.data.statistics.contamination import (
  Contamination,
  ContaminationSearch,
  Examples,
)
from palm_mtf.data.statistics.near_duplicates import (
  Duplicates,
  Sketches,
  find_duplicates,
)

_START_CHARACTERS = 60
_START_IDS = 10

# Number of tokens in a document's inputs, and in its text without [eod].
Lengths = tuple[int, int]
# Takes pairs (split, document); yields triples (split, document, lengths).
CountTokens = Callable[
  [Iterable[tuple[str, Document]]], Iterator[tuple[str, Document, Lengths]]
]


@dataclasses.dataclass
class TextCounts:
  """Counts of the documents of one source, or of all sources."""

  documents: int = 0  # each once, whatever its weight
  bytes: int = 0  # `Document.num_bytes` of all documents
  tokens: int | None = None  # with an [eod] per document; None if not counted
  held_out_documents: int = 0
  held_out_bytes: int = 0
  longest_bytes: int = 0  # of the longest document
  longest_start: str = ""  # beginning of the longest document

  def add(self, split: str, document: Document, tokens: int | None) -> None:
    """Counts a document; `tokens` excludes [eod], and is None if unknown."""
    num_bytes = document.num_bytes
    self.documents += 1
    self.bytes += num_bytes
    if tokens is not None:
      self.tokens = (self.tokens or 0) + tokens + 1
    if split == VALIDATION:
      self.held_out_documents += 1
      self.held_out_bytes += num_bytes
    if num_bytes > self.longest_bytes:
      self.longest_bytes = num_bytes
      self.longest_start = _start_of(document)


class Measured(NamedTuple):
  """The counts and the duplicates of one source, or of all sources together."""

  counts: TextCounts
  duplicates: Duplicates


@dataclasses.dataclass(frozen=True)
class Survey:
  """The statistics of a corpus."""

  sources: dict[str, Measured]  # by source name
  total: Measured  # all sources together, with duplicates across sources
  # Maps each evaluation set to its contamination by all training documents.
  # The set "validation" is the validation split of all sources.
  contamination: dict[str, Contamination]
  # Maps each largest group's `digest` to the beginning of the hashed document.
  starts: dict[bytes, str]


def survey(
  sources: Sequence[Source],
  count_tokens: CountTokens | None,
  evaluation_sets: dict[str, Examples],
  note_length: Callable[[Source, Document, Lengths], None] = lambda *_: None,
) -> Survey:
  """Reads all sources twice and returns their statistics.

  Args:
    sources: sources of a run; each logs a warning if it skips documents.
    count_tokens: function that counts documents' tokens; None to count none.
    evaluation_sets: evaluation sets by name, besides the validation split.
    note_length: function to call for each training document whose tokens are
      counted.

  Raises:
    UserError: a source cannot be read.
  """
  total, counts = TextCounts(), [TextCounts() for _ in sources]
  sketches = [Sketches() for _ in sources]
  held_out = Examples()
  # First pass: counts, sketches of all documents to find duplicates, and
  # n-grams of held-out documents to find contamination.
  for source, counted, sketch in zip(sources, counts, sketches, strict=True):
    documents = read_with_progress(source, "Measuring")
    if count_tokens:
      counts_of = count_tokens(documents)
    else:
      counts_of = ((*each, None) for each in documents)
    for split, document, lengths in counts_of:
      tokens = None if lengths is None else sum(lengths)
      if split == TRAIN and lengths is not None:
        note_length(source, document, lengths)
      counted.add(split, document, tokens)
      total.add(split, document, tokens)
      sketch.add(document, split)
      if split == VALIDATION:
        held_out.add(document)
    source.report_skipped()
  measured = {
    source.name: Measured(counted, find_duplicates([sketch]))
    for source, counted, sketch in zip(sources, counts, sketches, strict=True)
  }
  everything = Measured(total, find_duplicates(sketches))
  del sketches, sketch  # frees memory for the second pass
  searches = {
    name: ContaminationSearch(examples)
    for name, examples in {"validation": held_out, **evaluation_sets}.items()
  }
  starts = _search(sources, [*measured.values(), everything], searches.values())
  found = {name: each.result() for name, each in searches.items()}
  return Survey(measured, everything, found, starts)


def _search(
  sources: Sequence[Source],
  measured: Sequence[Measured],
  searches: Collection[ContaminationSearch],
) -> dict[bytes, str]:
  """Adds the training documents to `searches`; returns `Survey.starts`."""
  wanted = {
    group.digest
    for each in measured
    for group in each.duplicates.largest_exact + each.duplicates.largest_near
  }
  starts = {}
  for source in sources:
    for split, document in read_with_progress(source, "Comparing"):
      digest = document.digest()
      if digest in wanted:
        starts[digest] = _start_of(document)
      if split == TRAIN:
        for search in searches:
          search.add(document)
  return starts


def _start_of(document: Document) -> str:
  text = document.text if document.inputs is None else document.inputs
  if isinstance(text, str):
    return text[:_START_CHARACTERS]
  return f"token ids {', '.join(map(str, text[:_START_IDS].tolist()))}"
