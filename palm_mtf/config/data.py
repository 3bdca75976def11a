# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Where documents come from, and how they become rows of tokens."""

import bisect
import dataclasses
import os

from palm_mtf.errors import (
  UserError,
  are_texts,
  check_choice,
  check_count,
  check_globs,
  check_no_address,
  check_real,
  check_text,
)

EXACT, NEAR = "exact", "near"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilterConfig:
  """The documents that are removed from training and validation.

  The defaults remove none. docs/data.md says which of equal documents is kept.

  Attributes:
    decontaminate_tasks: names of SeqIO tasks or mixtures. No document may
      contain one of their examples in a split other than "train"
      (data/statistics/contamination.py).
    decontaminate_files: a glob, or a list of globs, of more examples that no
      document may contain, read like text_files; None for none.
    min_document_bytes: the fewest bytes of UTF-8 in a document.
    max_document_bytes: the most bytes of UTF-8 in a document; None for no
      limit.
    quality_field: the field of a JSON line with the document's quality, a
      number that the user computed, or None.
    min_quality: lowest quality that is kept.
    remove_duplicates: "exact" keeps one of all documents with the same text, in
      all sources; "near" also keeps only one of each group of near duplicates
      (data/statistics/near_duplicates.py); None keeps all.
  """

  decontaminate_tasks: list[str] | tuple[str, ...] = ()
  decontaminate_files: str | list[str] | tuple[str, ...] | None = None
  min_document_bytes: int = 0
  max_document_bytes: int | None = None
  quality_field: str | None = None
  min_quality: float | None = None
  remove_duplicates: str | None = None

  def __post_init__(self) -> None:
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
    # An empty list counts as the default, an empty tuple.
    tasks = tuple(self.decontaminate_tasks)
    plain = dataclasses.replace(self, decontaminate_tasks=tasks)
    return plain != FilterConfig()


@dataclasses.dataclass(frozen=True)
class SpanCorruption:
  """How many tokens span corruption removes (Raffel et al. 2020, 3.1.4).

  text       a b c d e f g h i [eod]
  inputs     a b X f g Y i             X, Y: sentinels
  targets    X c d e Y h [eod]

  Attributes:
    noise_density: share of the tokens that is removed.
    mean_span_length: tokens per removed span, on average.
  """

  noise_density: float
  mean_span_length: float

  def num_noise_tokens(self, length: int) -> int:
    """Returns how many of `length` tokens are removed: at least 1, not all."""
    wanted = max(round(length * self.noise_density), 1)
    return min(wanted, max(length - 1, 1), length)

  def num_spans(self, length: int) -> int:
    """Returns how many spans are removed; kept tokens separate two spans."""
    noise = self.num_noise_tokens(length)
    wanted = min(round(noise / self.mean_span_length), length - noise)
    return min(max(wanted, 1), noise)

  def row_length(self, length: int) -> int:
    """Returns the tokens of inputs and targets, sentinels and [eod] included.

    Args:
      length: tokens of the text, without [eod].
    """
    return length + 2 * self.num_spans(length) + 1

  def longest_text(self, row_length: int) -> int:
    """Returns the length of the longest text that fits a row, or 0."""
    # Bisection works because a longer text never makes a shorter row.
    lengths = range(row_length + 1)
    return bisect.bisect_right(lengths, row_length, key=self.row_length) - 1


PACKINGS = ("joined", "joined_masked", "packed", "single")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
  """Where documents come from and how they become rows of tokens.

  A document is a text, which the model learns as a whole, or an example: the
  model is given the inputs and learns the targets.

  Attributes:
    task: name of a registered SeqIO task or mixture, or None for text_files.
    text_files: a glob, a list of globs, or None for a task; `{stdlib}` stands
      for the folder of the running Python's standard library. A document is a
      file, or a line of a .jsonl file; files may be compressed (.gz, .bz2,
      .xz).
    text_field: the field of a JSON line that holds the document.
    weight_field: the field of a JSON line that says how many times an epoch
      reads the document; None for once each.
    vocabulary: path of a SentencePiece model, or None to train one of
      vocab_size pieces on the training documents and keep it in MODEL_DIR.
    extra_ids: number of sentinels <extra_id_0>, <extra_id_1>, ..., 100 in T5.
      Their ids come after the vocabulary's pieces, in reverse order.
    validation_share: share of the documents, chosen by a hash of their text,
      that is held out; unused for a task that has a validation split.
    cache_dir: folder of `palm_mtf data cache`, or None for MODEL_DIR/tokens.
    packing: how documents fill rows of sequence_length tokens: "joined" (with
      [eod] between them, cut anywhere, as PaLM 5), "joined_masked" (the same
      tokens, but positions and attention restart after each [eod]), "packed"
      (whole documents, as many as fit, padded and masked) or "single" (one
      document per row, padded).
    noise_density: share of a text's tokens that OBJECTIVE = "span_corruption"
      removes, 0.15 in T5.
    mean_span_length: tokens per removed span, on average, 3 in T5.
    filters: which documents are removed.
  """

  text_files: str | list[str] | tuple[str, ...] | None
  vocabulary: str | None
  validation_share: float
  task: str | None = None
  text_field: str = "text"
  weight_field: str | None = None
  cache_dir: str | None = None
  packing: str = "joined"
  extra_ids: int = 0
  noise_density: float = 0.15
  mean_span_length: float = 3.0
  filters: FilterConfig = dataclasses.field(default_factory=FilterConfig)

  def __post_init__(self) -> None:
    if (self.task is None) == (self.text_files is None):
      raise UserError(
        f"TASK = {self.task!r} and TEXT_FILES = {self.text_files!r}: set one "
        "of them, and the other to None."
      )
    files = self.text_files
    files = [files] if isinstance(files, str) else files
    if files is not None and not (files and are_texts(files)):
      raise UserError(
        f"TEXT_FILES = {self.text_files!r}: give a glob or a list of globs, "
        "such as '\"/any/folder/**/*.txt\"'."
      )
    check_text("TASK", self.task, "the name of a SeqIO task, or None")
    if self.task is not None and self.filters.quality_field is not None:
      raise UserError(
        f"QUALITY_FIELD = {self.filters.quality_field!r}: is a field of "
        "TEXT_FILES; let a preprocessor of the TASK filter, or set it to None."
      )
    check_text("WEIGHT_FIELD", self.weight_field, "a field's name, or None")
    check_text(
      "VOCABULARY",
      self.vocabulary,
      "the path of a SentencePiece model, or None to train one",
    )
    check_text("CACHE_DIR", self.cache_dir, "the path of a folder, or None")
    check_no_address("CACHE_DIR", self.cache_dir or "")
    if type(self.extra_ids) is not int or not 0 <= self.extra_ids <= 10_000:
      raise UserError(
        f"EXTRA_IDS = {self.extra_ids!r}: give a number of sentinels from 0 to "
        "10000, such as 100, as T5 has them."
      )
    if not isinstance(self.text_field, str) or not self.text_field:
      raise UserError(
        f"TEXT_FIELD = {self.text_field!r}: give the name of a field."
      )
    check_real("NOISE_DENSITY", self.noise_density, 0.01, 0.99)
    check_real("MEAN_SPAN_LENGTH", self.mean_span_length, 1.0, 1000.0)
    # Some text has to be held out, but most of it is for training.
    check_real("VALIDATION_SHARE", self.validation_share, 1e-4, 0.5)
    check_choice("PACKING", self.packing, PACKINGS)

  @property
  def span_corruption(self) -> SpanCorruption:
    """What OBJECTIVE = "span_corruption" removes from a text."""
    return SpanCorruption(self.noise_density, self.mean_span_length)

  @property
  def cache_folder(self) -> str | None:
    """The path of cache_dir, its `~` expanded."""
    return self.cache_dir and os.path.expanduser(self.cache_dir)
