# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which documents of the sources a run leaves out."""

import dataclasses

from palm_mtf.errors import (
  UserError,
  are_texts,
  check_choice,
  check_count,
  check_globs,
  check_real,
  check_text,
)

EXACT, NEAR = "exact", "near"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilterConfig:
  """Documents that are removed from training and validation.

  The defaults remove none. docs/data.md says which of equal documents stays.

  Attributes:
    decontaminate_tasks: names of SeqIO tasks or mixtures, whose examples, of
      all splits but "train", no document may contain
      (data/statistics/contained_examples.py).
    decontaminate_files: a glob, or several in a list, of more such examples,
      read like text_files; None for none.
    min_document_bytes: bytes of UTF-8 that a document has at least.
    max_document_bytes: bytes that it has at most; None for no limit.
    quality_field: the field of a JSON line with the document's quality, a
      number that the user computed; None for none.
    min_quality: lowest quality that is kept.
    remove_duplicates: "exact" keeps one of all documents with the same text,
      of all sources; "near" one of each group of near duplicates too
      (data/statistics/near_duplicates.py); None keeps all.
  """

  decontaminate_tasks: list[str] | tuple[str, ...] = ()
  decontaminate_files: str | list[str] | tuple[str, ...] | None = None
  min_document_bytes: int = 0
  max_document_bytes: int | None = None
  quality_field: str | None = None
  min_quality: float | None = None
  remove_duplicates: str | None = None

  def __post_init__(self):
    check_count("MIN_DOCUMENT_BYTES", self.min_document_bytes, 0)
    if self.max_document_bytes is not None:
      least = max(1, self.min_document_bytes)
      check_count("MAX_DOCUMENT_BYTES", self.max_document_bytes, least)
    check_text("QUALITY_FIELD", self.quality_field, "a field's name, or None")
    if (self.quality_field is None) != (self.min_quality is None):
      raise UserError(
        f"QUALITY_FIELD = {self.quality_field!r} and MIN_QUALITY = "
        f"{self.min_quality!r}: set both of them, or neither."
      )
    if self.min_quality is not None:
      check_real("MIN_QUALITY", self.min_quality, -1e300, 1e300)
    names, files = self.decontaminate_tasks, self.decontaminate_files
    if not are_texts(names):
      raise UserError(
        f"DECONTAMINATE_TASKS = {names!r}: give a list of names of SeqIO "
        "tasks, or [] for none."
      )
    check_globs("DECONTAMINATE_FILES", files)
    if self.remove_duplicates is not None:
      check_choice("REMOVE_DUPLICATES", self.remove_duplicates, [EXACT, NEAR])

  @property
  def removes(self) -> bool:
    """Whether there is any filter."""
    # An empty list is as good as the default.
    tasks = tuple(self.decontaminate_tasks)
    plain = dataclasses.replace(self, decontaminate_tasks=tasks)
    return plain != FilterConfig()
