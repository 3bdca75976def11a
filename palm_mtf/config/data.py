# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Where documents come from, and how they become rows of tokens."""

import bisect
import dataclasses
import os
from collections.abc import Mapping
from typing import Annotated, Literal

from palm_mtf.config.checked import (
  Checked,
  Globs,
  real,
  text,
  texts,
  texts_by_task,
  whole,
)
from palm_mtf.errors import (
  UserError,
  are_globs,
  check_count,
  check_no_address,
)

EXACT, NEAR = "exact", "near"
Packing = Literal["joined", "joined_masked", "packed", "single"]
FieldName = Annotated[str | None, text("a field's name, or None")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilterConfig(Checked):
  """Which documents are removed from training and validation.

  The defaults remove none.

  Attributes:
    decontaminate_tasks: names of SeqIO tasks or mixtures. A document is removed
      if it contains an example from a split of these tasks other than "train"
      (data/ngrams.py).
    decontaminate_files: a glob, or a list of globs, of files with more such
      examples, which are read like text_files; or None.
    min_document_bytes: minimum size of a document, in bytes of UTF-8.
    max_document_bytes: maximum size of a document, in bytes of UTF-8, or None.
    quality_field: the field of a JSON line that holds the document's quality, a
      number that the user has computed; None for no filter by quality.
    min_quality: lowest quality that is kept; None without quality_field.
    attribute_filters: conditions, such as "TOOL/KEY >= 0.5", on attributes that
      other tools gave to documents (data/sources/attributes.py).
    remove_duplicates: "exact" keeps only one of all documents with the same
      text, across all sources; "near" also keeps only one of each group of near
      duplicates (data/ngrams.py); None keeps all.
      docs/data.md says which duplicate is kept.
  """

  decontaminate_tasks: Annotated[
    list[str] | tuple[str, ...], texts("names of SeqIO tasks")
  ] = ()
  decontaminate_files: Globs = None
  min_document_bytes: Annotated[int, whole(0)] = 0
  max_document_bytes: int | None = None
  quality_field: FieldName = None
  min_quality: Annotated[float | None, real(-1e300, 1e300)] = None
  attribute_filters: Annotated[
    list[str] | tuple[str, ...], texts("conditions")
  ] = ()
  remove_duplicates: Literal["exact", "near"] | None = None

  def __post_init__(self) -> None:
    super().__post_init__()
    # Decisions are found by a hash of the filters, which must be hashable.
    object.__setattr__(self, "attribute_filters", (*self.attribute_filters,))
    if self.max_document_bytes is not None:
      least = max(1, self.min_document_bytes)
      check_count("MAX_DOCUMENT_BYTES", self.max_document_bytes, least)
    if (self.quality_field is None) != (self.min_quality is None):
      raise UserError(
        f"QUALITY_FIELD = {self.quality_field!r} and MIN_QUALITY = "
        f"{self.min_quality!r}: set both of them, or neither."
      )

  @property
  def removes(self) -> bool:
    """Whether any filter is set."""
    # Compare [] as a tuple, because the default is ().
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
    """Returns how many of `length` tokens are removed."""
    # Of 2 or more tokens, at least one is removed and at least one is kept.
    wanted = max(round(length * self.noise_density), 1)
    return min(wanted, max(length - 1, 1), length)

  def num_spans(self, length: int) -> int:
    """Returns how many spans are removed; kept tokens separate the spans."""
    noise = self.num_noise_tokens(length)
    wanted = min(round(noise / self.mean_span_length), length - noise)
    return min(max(wanted, 1), noise)

  def row_length(self, length: int) -> int:
    """Returns the length of inputs and targets together.

    The text has `length` tokens, [eod] not counted.
    """
    return length + 2 * self.num_spans(length) + 1

  def longest_text(self, row_length: int) -> int:
    """Returns the length of the longest text that fits a row, or 0 if none."""
    # Bisection works, because a longer text never makes a shorter row.
    lengths = range(row_length + 1)
    return bisect.bisect_right(lengths, row_length, key=self.row_length) - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Checked):
  """Where documents come from and how they become rows of tokens.

  A document is a text, which the model learns to predict as a whole, or an
  example, whose inputs are given and whose targets the model learns to predict.

  Attributes:
    task: name of a registered SeqIO task or mixture; None to read text_files.
    text_files: a glob or a list of globs; None if `task` is set. `{stdlib}`
      stands for the folder of Python's standard library. A document is a file,
      or a line of a .jsonl file; files may be compressed (.gz, .bz2, .xz).
    text_field: the field of a JSON line that holds the document.
    weight_field: the field of a JSON line that says how often, on average, an
      epoch reads the document; None to read every document once.
    vocabulary: path of a SentencePiece model, or of a tokenizer.json of Hugging
      Face; None to train a model with vocab_size pieces on the training
      documents and keep it in MODEL_DIR.
    extra_ids: number of sentinels <extra_id_0>, <extra_id_1>, ..., 100 in T5.
      Their ids come after the vocabulary's pieces, in reverse order.
    validation_share: share of the documents that is held out, chosen by a hash
      of the text; unused for a task that has a validation split.
    cache_dir: folder that `palm_mtf data cache` writes; None for
      MODEL_DIR/tokens.
    packing: how documents fill rows of sequence_length tokens: "joined" (with
      [eod] between documents, split anywhere, as in PaLM), "joined_masked" (the
      same tokens, but positions and attention restart after each [eod]),
      "packed" (as many whole documents as fit, padded and masked) or "single"
      (one document per row, padded).
    start_id: id of the token that the model reads before each document, and at
      the start of each row; None for 0 or, between "joined" documents, [eod].
      [eod] takes the place of 0 if 0 is no control token. Imported models have
      the token with which they were trained.
    add_start: whether `start_id` stands before prompts and documents. If False,
      nothing stands before a prompt, and [eod] before documents and at the
      start of rows. Imported models do what their tokenizers do.
    context_length: maximum sequence length of an imported model, in tokens.
      Exports keep it if SEQUENCE_LENGTH is shorter. None for SEQUENCE_LENGTH.
    neighbour_index: folder of `palm_mtf index chunks`, in which NEIGHBOURS are
      found; None for none.
    noise_density: share of the tokens that "span_corruption" removes.
    mean_span_length: tokens per removed span, on average.
    licenses: {glob or name of a task: licence}, for `palm_mtf data report`.
    filters: which documents are removed.
  """

  text_files: str | list[str] | tuple[str, ...] | None
  vocabulary: Annotated[
    str | None, text("the path of a vocabulary, or None to train one")
  ]
  validation_share: Annotated[float, real(1e-4, 0.5)]
  task: Annotated[str | None, text("the name of a SeqIO task, or None")] = None
  text_field: Annotated[str, text("the name of a field")] = "text"
  weight_field: FieldName = None
  cache_dir: Annotated[str | None, text("the path of a folder, or None")] = None
  packing: Packing = "joined"
  start_id: Annotated[int | None, whole(0)] = None
  add_start: bool = True
  context_length: Annotated[int | None, whole()] = None
  extra_ids: Annotated[int, whole(0, 10_000)] = 0
  neighbour_index: Annotated[
    str | None, text("the path of a folder, or None")
  ] = None
  noise_density: Annotated[float, real(0.01, 0.99)] = 0.15  # as in T5
  mean_span_length: Annotated[float, real(1.0, 1000.0)] = 3.0  # as in T5
  licenses: Annotated[
    Mapping[str, str] | None, texts_by_task('{"books/*.txt": "CC0-1.0"}')
  ] = None
  filters: FilterConfig = dataclasses.field(default_factory=FilterConfig)

  def __post_init__(self) -> None:
    if (self.task is None) == (self.text_files is None):
      raise UserError(
        f"TASK = {self.task!r} and TEXT_FILES = {self.text_files!r}: set one "
        "of them, and the other to None."
      )
    if self.text_files is not None and not are_globs(self.text_files):
      raise UserError(
        f"TEXT_FILES = {self.text_files!r}: give a glob or a list of globs, "
        "such as '\"/any/folder/**/*.txt\"'."
      )
    super().__post_init__()
    for name in ("quality_field", "attribute_filters"):
      if self.task is not None and (value := getattr(self.filters, name)):
        raise UserError(
          f"{name.upper()} = {value!r}: is for TEXT_FILES; let a preprocessor "
          "of the TASK filter, or leave it out."
        )
    check_no_address("CACHE_DIR", self.cache_dir or "")

  @property
  def span_corruption(self) -> SpanCorruption:
    """How much OBJECTIVE = "span_corruption" removes from a text."""
    return SpanCorruption(self.noise_density, self.mean_span_length)

  @property
  def cache_folder(self) -> str | None:
    """cache_dir with its `~` expanded; None if cache_dir is None."""
    return self.cache_dir and os.path.expanduser(self.cache_dir)
