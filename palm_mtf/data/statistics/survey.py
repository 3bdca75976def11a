# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures a corpus, source by source, in two readings.

The first counts documents, bytes and tokens, sketches every document for
near_duplicates.py and keeps n-grams of those held out for contamination.py. The
second looks for these in the training documents, and for how the largest groups
of duplicates begin. Both hold one document at a time.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from palm_mtf.console import progress_bar
from palm_mtf.data.sources.document import (
  TRAIN,
  VALIDATION,
  Document,
  Source,
  Text,
  cut_text,
)
from palm_mtf.data.statistics.contamination import (
  Contamination,
  Examples,
  Overlap,
)
from palm_mtf.data.statistics.near_duplicates import (
  Duplicates,
  Sketches,
  find_duplicates,
  text_digest,
)
from palm_mtf.data.vocabulary.vocabulary import Vocabulary

_START_CHARACTERS = 60
_START_IDS = 10
# A longer text is encoded in parts of whole lines, many parts at once.
_PART_CHARACTERS = 1 << 16
_BATCH_CHARACTERS = 1 << 19


@dataclasses.dataclass(frozen=True)
class TextCounts:
  """What one source, or all of them, hold.

  Attributes:
    documents: each once, whatever its weight.
    bytes: bytes of their text in UTF-8.
    tokens: one [eod] a document among them; None without a vocabulary.
    held_out_documents: documents of the validation split.
    held_out_bytes: bytes of the held-out text.
    longest_bytes: bytes of the longest document.
    longest_start: how that begins.
  """

  documents: int
  bytes: int
  tokens: int | None
  held_out_documents: int
  held_out_bytes: int
  longest_bytes: int
  longest_start: str


class Measured(NamedTuple):
  """Counts and duplicates of one source, or of all of them."""

  counts: TextCounts
  duplicates: Duplicates


@dataclasses.dataclass(frozen=True)
class Survey:
  """The statistics of a corpus.

  Attributes:
    sources: by name.
    total: counts of all sources; duplicates among them count too.
    overlap: overlap of evaluation sets with the training documents of all
      sources: "validation" is their validation split, others are by name.
    starts: how a member of each of the largest groups begins, by its digest.
  """

  sources: dict[str, Measured]
  total: Measured
  overlap: dict[str, Contamination]
  starts: dict[bytes, str]


def survey(
  sources: Sequence[Source],
  vocabulary: Vocabulary | None,
  evaluation_sets: dict[str, Examples],
) -> Survey:
  """Reads all sources twice and returns their statistics.

  Args:
    sources: sources of a run; what they leave out is logged.
    vocabulary: to count tokens with, or None.
    evaluation_sets: further ones to compare with the training documents.

  Raises:
    UserError: as the sources do.
  """
  counters = [_Counter(vocabulary) for _ in sources]
  sketches = [Sketches() for _ in sources]
  held_out = Examples()
  with _bar("Measuring text", sources) as advance:
    for source, counter, sketch in zip(
      sources, counters, sketches, strict=True
    ):
      for split, document in source.documents():
        counter.add(document, split)
        sketch.add(document, split)
        if split == VALIDATION:
          held_out.add(document)
        advance(document.num_bytes)
      source.report_skipped()
  counts = [counter.result() for counter in counters]
  measured = {
    source.name: Measured(each, find_duplicates([sketch]))
    for source, each, sketch in zip(sources, counts, sketches, strict=True)
  }
  total = Measured(_add_up(counts), find_duplicates(sketches))
  del sketches, sketch
  overlaps = {
    name: Overlap(examples)
    for name, examples in {"validation": held_out, **evaluation_sets}.items()
  }
  starts = _compare(sources, [*measured.values(), total], [*overlaps.values()])
  overlap = {name: each.result() for name, each in overlaps.items()}
  return Survey(measured, total, overlap, starts)


class _Counter:
  """Counts the documents of one source."""

  def __init__(self, vocabulary: Vocabulary | None):
    self._vocabulary = vocabulary
    self._batch: list[str] = []
    self._batch_characters = 0
    self._tokens = self._documents = self._bytes = 0
    self._held_out_documents = self._held_out_bytes = 0
    self._longest_bytes, self._longest_start = 0, ""

  def add(self, document: Document, split: str) -> None:
    """Counts one document of `split`."""
    num_bytes = document.num_bytes
    self._documents += 1
    self._bytes += num_bytes
    if split == VALIDATION:
      self._held_out_documents += 1
      self._held_out_bytes += num_bytes
    if num_bytes > self._longest_bytes:
      self._longest_bytes = num_bytes
      self._longest_start = _start(document)
    if self._vocabulary is not None:
      self._tokens += 1  # [eod]
      for text in (document.inputs, document.text):
        self._count_tokens(text)

  def result(self) -> TextCounts:
    """Returns the counts of the documents so far."""
    self._encode()
    return TextCounts(
      self._documents,
      self._bytes,
      None if self._vocabulary is None else self._tokens,
      self._held_out_documents,
      self._held_out_bytes,
      self._longest_bytes,
      self._longest_start,
    )

  def _count_tokens(self, text: Text | None) -> None:
    if text is None:
      return
    if not isinstance(text, str):
      self._tokens += len(text)
      return
    for part in cut_text(text, _PART_CHARACTERS):
      self._batch.append(part)
      self._batch_characters += len(part)
      if self._batch_characters >= _BATCH_CHARACTERS:
        self._encode()

  def _encode(self) -> None:
    if self._batch:
      self._tokens += sum(map(len, self._vocabulary.encode_batch(self._batch)))
    self._batch, self._batch_characters = [], 0


def _compare(
  sources: Sequence[Source],
  measured: Sequence[Measured],
  overlaps: Sequence[Overlap],
) -> dict[bytes, str]:
  """Shows `overlaps` all training documents; returns starts of groups."""
  wanted = {
    group.digest
    for each in measured
    for group in each.duplicates.largest_exact + each.duplicates.largest_near
  }
  starts = {}
  with _bar("Comparing text", sources) as advance:
    for source in sources:
      for split, document in source.documents():
        digest = text_digest(document)
        if digest in wanted:
          starts[digest] = _start(document)
        if split == TRAIN:
          for overlap in overlaps:
            overlap.add(document)
        advance(document.num_bytes)
  return starts


def _bar(description: str, sources: Sequence[Source]):
  """Returns the progress bar of one reading."""
  sizes = [source.num_bytes for source in sources]
  return progress_bar(description, None if None in sizes else sum(sizes))


def _add_up(counts: Sequence[TextCounts]) -> TextCounts:
  """Returns the counts of all sources together."""
  longest = max(counts, key=lambda each: each.longest_bytes)
  sums = {
    name: sum(getattr(each, name) for each in counts)
    for name in ("documents", "bytes", "held_out_documents", "held_out_bytes")
  }
  tokens = [each.tokens for each in counts]
  return dataclasses.replace(
    longest, **sums, tokens=None if None in tokens else sum(tokens)
  )


def _start(document: Document) -> str:
  """Returns how a document begins: characters, or token ids."""
  text = document.text if document.inputs is None else document.inputs
  if isinstance(text, str):
    return text[:_START_CHARACTERS]
  return f"token ids {', '.join(map(str, text[:_START_IDS].tolist()))}"
