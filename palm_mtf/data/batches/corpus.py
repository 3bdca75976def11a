# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The corpus of a run: encodes and checks its sources, and makes batches."""

import dataclasses
import functools
import logging
from collections.abc import Iterator

from palm_mtf.config import Config, DataConfig
from palm_mtf.config.run import BatchSizes
from palm_mtf.config.watch import Skips
from palm_mtf.data.batches.batches import (
  Batch,
  Batches,
  RowStream,
  validation_batches,
)
from palm_mtf.data.batches.joined_stream import JoinedStream, TokenSource
from palm_mtf.data.batches.mixed_rows import MixedRows, RowSource
from palm_mtf.data.batches.objectives import (
  CAUSAL,
  Objective,
  make_objective,
  to_json,
)
from palm_mtf.data.batches.packing import JoinedRows, WholeRows
from palm_mtf.data.filters.filtered_source import open_filtered
from palm_mtf.data.sources.document import Source, hash_parts
from palm_mtf.data.tokens.array import TokenArray
from palm_mtf.data.tokens.store import TokenStore, load_stores
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
  """The encoded sources of a run."""

  sources: list[Source]
  stores: list[TokenStore]  # one per source
  packing: str  # PACKING
  sequence_length: int
  eod_id: int
  seed: int  # seed of every shuffle
  objective: Objective = CAUSAL
  first: int = 0  # input at the start of a row or document

  @property
  def fingerprint(self) -> str:
    """A hash of everything that determines the rows, except the seed."""
    parts = [self.packing, self.sequence_length]
    if self.packing.startswith("joined"):
      # Earlier versions shuffled only rows, so their hash must differ.
      parts.append("shuffled documents")
    if self.first:
      parts.append(f"start {self.first}")
    if self.objective != CAUSAL:
      parts.append(to_json(self.objective))
    for source, store in zip(self.sources, self.stores, strict=True):
      parts += [source.name, source.rate, store.fingerprint]
    return hash_parts(parts)

  @property
  def validation_bytes_per_token(self) -> float:
    """Mean bytes of text per learned token in the validation batches."""
    # Weight each source by its rate, because sources share the validation rows
    # in proportion to their rates, and every row has the same number of tokens.
    return sum(
      source.rate * store.validation.bytes_per_token
      for source, store in zip(self.sources, self.stores, strict=True)
    )

  def batches(self, sizes: BatchSizes, skips: Skips | None = None) -> Batches:
    """Returns the training batches, except the batches that `skips` lists.

    Raises:
      UserError: an epoch holds less than one batch.
    """
    rows = self._training_rows
    num_rows = rows.num_rows
    if num_rows < sizes.largest:
      tokens = sum(len(store.train.tokens) for store in self.stores)
      raise UserError(
        f"training text = {tokens:,} tokens, {num_rows:,} rows: less than one "
        f"batch, GLOBAL_BATCH_SIZE = {sizes.largest:,} rows of SEQUENCE_LENGTH "
        f"= {self.sequence_length:,} tokens; give more text, lower "
        "VALIDATION_SHARE, or lower GLOBAL_BATCH_SIZE or SEQUENCE_LENGTH."
      )
    return Batches(rows, sizes, skips)

  def validation_batches(
    self, *, batch_size: int, num_rows: int
  ) -> Iterator[Batch]:
    """Returns the validation batches; see `batches.validation_batches`."""
    return validation_batches(
      self._validation_rows,
      batch_size=batch_size,
      num_rows=num_rows,
      seed=self.seed,
    )

  # Cache the rows, because WholeRows reads the lengths of all documents.
  @functools.cached_property
  def _training_rows(self) -> RowStream:
    if self.packing in ("packed", "single"):
      return MixedRows(self._rows("train"), seed=self.seed)
    for source, store in zip(self.sources, self.stores, strict=True):
      self._check_has_a_row(source, "train", store.train.tokens)
    return JoinedStream(
      [
        TokenSource(source.name, source.rate, store.train.tokens)
        for source, store in zip(self.sources, self.stores, strict=True)
      ],
      self.sequence_length,
      eod_id=self._segment_end,
      seed=self.seed,
      first=self.first,
    )

  @functools.cached_property
  def _validation_rows(self) -> list[RowSource]:
    return self._rows("validation")

  @property
  def _segment_end(self) -> int | None:
    return self.eod_id if self.packing == "joined_masked" else None

  def _rows(self, split: str) -> list[RowSource]:
    return [
      RowSource(source.name, source.rate, self._make_rows(source, split, store))
      for source, store in zip(self.sources, self.stores, strict=True)
    ]

  def _make_rows(
    self, source: Source, split: str, store: TokenStore
  ) -> JoinedRows | WholeRows:
    tokens: TokenArray = getattr(store, split).tokens
    if self.packing in ("joined", "joined_masked"):
      self._check_has_a_row(source, split, tokens)
      return JoinedRows(
        tokens, self.sequence_length, eod_id=self._segment_end, first=self.first
      )
    rows = WholeRows(
      tokens,
      self.sequence_length,
      objective=self.objective,
      packed=self.packing == "packed",
      seed=self.seed,
      first=self.first,
    )
    if rows.num_cut:
      _logger.warning(
        f"{rows.num_cut:,} examples of {source.name} ({split}) are longer "
        f"than SEQUENCE_LENGTH = {self.sequence_length:,}: the beginning of "
        "their inputs, or the end of their targets, is left out"
      )
    return rows

  def _check_has_a_row(
    self, source: Source, split: str, tokens: TokenArray
  ) -> None:
    if len(tokens) < self.sequence_length:
      share = "lower" if split == "train" else "raise"
      raise UserError(
        f"{source.name}, {split} = {len(tokens):,} tokens: less than one row; "
        f"give more text, {share} VALIDATION_SHARE, or lower SEQUENCE_LENGTH = "
        f"{self.sequence_length:,}."
      )


def corpus_of_run(
  model_dir: str, config: Config, vocabulary: Vocabulary
) -> Corpus:
  """Returns the corpus of a run; encodes each source that has no token store.

  Tokens that CACHE_DIR lacks are stored in MODEL_DIR.

  Raises:
    UserError: there is no text, a source has no document for training or for
      validation, a SeqIO task's token ids are from another vocabulary, or the
      disk is full.
  """
  data, sequence_length = config.data, config.model.sequence_length
  sources = open_filtered(model_dir, data, sequence_length)
  stores = load_stores(model_dir, data, sources, vocabulary)
  for source, store in zip(sources, stores, strict=True):
    _check_splits(source, store, data)
  # Other packings need no warning, because they do not join documents.
  if data.packing in ("joined", "joined_masked"):
    longest = max(s.train.counts.longest_document_tokens for s in stores)
    if sequence_length > longest:
      _logger.warning(
        f"SEQUENCE_LENGTH = {sequence_length:,} is longer than the longest "
        f"training document ({longest:,} tokens with [eod]): documents are "
        f"joined, so training works, but no token learns from more than "
        f"{longest - 1:,} tokens of its document."
      )
  return Corpus(
    sources=sources,
    stores=stores,
    packing=data.packing,
    objective=make_objective(config.model.objective, data, vocabulary),
    sequence_length=sequence_length,
    eod_id=vocabulary.eod_id,
    seed=config.run.seed,
    first=data.start_id or 0,
  )


def _check_splits(source: Source, store: TokenStore, data: DataConfig) -> None:
  splits = {"training": store.train, "validation": store.validation}
  for name, split in splits.items():
    if split.counts.num_documents:
      continue
    # Documents with a rank (a hash in [0, 1)) below VALIDATION_SHARE are held
    # out, so a share just above the lowest rank holds out a document.
    others = store.train.counts.num_documents
    enough = int(store.lowest_rank * 1000 + 1) / 1000
    fix = "give more text"
    if name == "validation" and enough <= 0.5 and others > 1:
      fix = f"set VALIDATION_SHARE = {enough} or give more text"
    raise UserError(
      f"VALIDATION_SHARE = {data.validation_share}: leaves no document of "
      f"{source.name} for {name}; {fix}."
    )
