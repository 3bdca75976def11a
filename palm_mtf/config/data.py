# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Where documents come from, and how they become rows of tokens."""

import dataclasses
import os

from palm_mtf.config.filters import FilterConfig
from palm_mtf.config.span_corruption import SpanCorruption
from palm_mtf.errors import (
  UserError,
  are_texts,
  check_choice,
  check_no_address,
  check_real,
  check_text,
)

PACKINGS = ("joined", "joined_masked", "packed", "single")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
  """Where documents come from and how they become rows of tokens.

  A document is a text that is learnt as a whole, or an example: inputs, which
  are given, and targets, which are learnt.

  Attributes:
    task: name of a registered SeqIO task or mixture, or None for text_files.
    text_files: a glob, or several in a list, or None for a task; `{stdlib}`
      stands for the folder of the running Python's standard library. A file is
      one document, a line of a .jsonl file too; both may be compressed (.gz,
      .bz2, .xz).
    text_field: the field of a JSON line that is the document.
    weight_field: the field of a JSON line that says how often the document
      comes in an epoch, or None for once each.
    vocabulary: path of a SentencePiece model, or None to train one of
      vocab_size pieces on the training documents and keep it in MODEL_DIR.
    extra_ids: sentinels <extra_id_0>, <extra_id_1>, ... behind the vocabulary's
      pieces, the first of them last, 100 in T5.
    validation_share: share of the documents, chosen by a hash of their text,
      that is held out; a task with a validation split of its own has no use
      for it.
    cache_dir: folder of `palm_mtf data cache`, or None for MODEL_DIR/tokens.
    packing: how documents fill rows of sequence_length tokens: "joined" (with
      [eod] between, cut anywhere, as PaLM 5), "joined_masked" (the same tokens,
      but positions and attention begin anew after each [eod]), "packed" (whole
      documents, as many as fit, padded, masked too) or "single" (one document
      in a row, padded).
    noise_density: share of a text's tokens that OBJECTIVE = "span_corruption"
      takes out, 0.15 in T5.
    mean_span_length: tokens of a span that it takes out, on average, 3 in T5.
    filters: which documents are left out.
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

  def __post_init__(self):
    if (self.task is None) == (self.text_files is None):
      raise UserError(
        f"TASK = {self.task!r} and TEXT_FILES = {self.text_files!r}: set one "
        "of them, and the other to None."
      )
    # One glob is as good as a list of one.
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
    # Some text has to be held out, and most of it learnt.
    check_real("VALIDATION_SHARE", self.validation_share, 1e-4, 0.5)
    check_choice("PACKING", self.packing, PACKINGS)

  @property
  def span_corruption(self) -> SpanCorruption:
    """What OBJECTIVE = "span_corruption" takes out of a text."""
    return SpanCorruption(self.noise_density, self.mean_span_length)

  @property
  def cache_folder(self) -> str | None:
    """The path of cache_dir, its `~` expanded."""
    return self.cache_dir and os.path.expanduser(self.cache_dir)
