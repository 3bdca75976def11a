# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The corpus of a run: encodes and checks its sources, and makes batches.

A batch is computed from SEED and the step number, without state. The rows of a
run are numbered. config/run.py gives the number of rows per step, and
row_streams.py reads a row by its number. So a run resumes without reading
earlier rows, and no row depends on batch sizes, pods or hosts.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from palm_mtf.config import Config, DataConfig
from palm_mtf.config.neighbours import num_neighbours
from palm_mtf.config.run import BatchSizes
from palm_mtf.config.watch import Skips
from palm_mtf.data.batches.conversations import (
  check_prompts,
  open_conversations,
)
from palm_mtf.data.batches.neighbours import NeighbourIndex
from palm_mtf.data.batches.packing import (
  CAUSAL,
  FEATURES,
  JoinedRows,
  Objective,
  Piece,
  Row,
  WholeRows,
  make_objective,
  row_start,
  to_json,
)
from palm_mtf.data.batches.row_streams import (
  JoinedStream,
  MixedRows,
  Mixture,
  RowSource,
  TokenSource,
  list_features,
)
from palm_mtf.data.filters.filtered_source import open_filtered
from palm_mtf.data.sources.conversation import PAIRS, PLAIN_PAIRS, TEXTS
from palm_mtf.data.sources.document import Source, hash_parts
from palm_mtf.data.tokens.shard import TokenArray
from palm_mtf.data.tokens.store import TokenStore, load_stores
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError

_logger = logging.getLogger(__name__)

Batch = dict[str, np.ndarray]  # {feature, such as "inputs": [batch, length]}


class Batches:
  """The training batches of a run, each computed from its step number."""

  def __init__(
    self,
    rows: JoinedStream | MixedRows,
    sizes: BatchSizes,
    skips: Skips | None = None,
    virtual: int = 0,
  ):
    """Makes batches of rows, except the batches in `skips` (loss spikes).

    `virtual` is the number of virtual positions to put before each row.
    """
    self._rows = rows
    self._sizes = sizes
    self._skips = skips or Skips()
    self._virtual = virtual
    self.features = _add_weights(rows.features, virtual)

  def batch(self, step: int, part: int = 0, num_parts: int = 1) -> Batch:
    """Returns the batch of a step, or one of `num_parts` equal parts of it.

    Steps and parts count from 0. Each pod reads a different part. The arrays
    are [batch / num_parts, length], int32; "loss_weights" is float32.
    """
    rows = self._rows.read(self._row_numbers(step, part, num_parts))
    return _stack(rows, self.features, self._virtual)

  def pieces(self, step: int) -> list[list[Piece]]:
    """Returns which parts of documents each row has, for `data inspect`."""
    return self._rows.pieces(self._row_numbers(step, 0, 1))

  def _row_numbers(self, step: int, part: int, num_parts: int) -> np.ndarray:
    part_rows = self._sizes.size(step) // num_parts
    first = self._sizes.rows_before(step) + part * part_rows
    return self._skips.rows(first + np.arange(part_rows), self._sizes)


def split_batch(batch: Batch, num_parts: int) -> list[Batch]:
  """Splits a batch into equal parts, which take less memory one at a time."""
  parts = zip(*(np.split(x, num_parts) for x in batch.values()), strict=True)
  return [dict(zip(batch, part, strict=True)) for part in parts]


def batch_hash(batch: Batch) -> str:
  """Returns a hexadecimal hash, to tell if two runs read the same batch."""
  digest = hashlib.blake2b(digest_size=8)
  for name in FEATURES:
    if name in batch:
      digest.update(name.encode() + batch[name].tobytes())
  return digest.hexdigest()


def unigram_entropy(batches: Iterable[Batch]) -> float:
  """Returns the unigram entropy of the tokens that have a loss, in nats."""
  # A model that ignores context cannot have a lower loss on these tokens, so a
  # model with a lower loss has learned from context.
  counts = np.zeros(0, np.int64)
  for batch in batches:
    learned = batch["targets"]
    if "loss_weights" in batch:
      learned = learned[batch["loss_weights"] > 0]
    # Extend `counts`, because a batch may have higher ids than earlier batches.
    new = np.bincount(learned.ravel(), minlength=len(counts))
    new[: len(counts)] += counts
    counts = new
  shares = counts[counts > 0] / max(1, counts.sum())
  return float(-np.sum(shares * np.log(shares)))


class Prefetcher(contextlib.AbstractContextManager):
  """Makes the next steps' batches in a thread, so that training need not wait.

  Use it as a context manager. Several threads may ask for the batch of one
  step, for example two stages of a pipeline on one server.
  """

  def __init__(
    self, batch_of: Callable[[int], Batch], last_step: int, depth: int
  ):
    self._batch_of, self._last_step, self._depth = batch_of, last_step, depth
    self._thread = concurrent.futures.ThreadPoolExecutor(1, "batches")
    self._lock = threading.Lock()
    self._made: dict[int, concurrent.futures.Future[Batch]] = {}

  def __exit__(self, *exception: object) -> None:
    self._thread.shutdown(cancel_futures=True)

  def batch(self, step: int) -> Batch:
    """Returns a step's batch, and starts to make the next `depth` batches."""
    with self._lock:
      # Drop only earlier steps: other threads may ask for this step's batch.
      self._made = {x: made for x, made in self._made.items() if x >= step}
      for each in range(step, min(step + 1 + self._depth, self._last_step)):
        if each not in self._made:
          self._made[each] = self._thread.submit(self._batch_of, each)
      made = self._made[step]
    try:
      return made.result()
    except BaseException:
      with self._lock:
        self._made.pop(step, None)  # forget the error: the next call retries
      raise


def _add_weights(features: Sequence[str], virtual: int) -> tuple[str, ...]:
  # Virtual positions have no loss, so rows that begin with some have weights.
  more = ["loss_weights"] if virtual else []
  return tuple(x for x in FEATURES if x in (*features, *more))


def _stack(
  rows: Sequence[Row], features: Sequence[str], virtual: int = 0
) -> Batch:
  length = len(rows[0]["targets"])
  # The sources of a mixture may have different features. A row without
  # "segments" is one segment; a row without "loss_weights" has weights of 1.
  ones = {
    "segments": np.ones(length, np.int32),
    "loss_weights": np.ones(length, np.float32),
  }
  batch = {
    name: np.array([row[name] if name in row else ones[name] for row in rows])
    for name in features
  }
  if virtual:  # joined rows, whose features all have a value per position
    batch = {x: np.pad(y, [[0, 0], [virtual, 0]]) for x, y in batch.items()}
  return batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
  """The stored tokens of a run's sources, and how to make batches of them."""

  sources: list[Source]
  stores: list[TokenStore]  # in the order of `sources`
  packing: str  # PACKING, such as "joined"
  sequence_length: int
  eod_id: int
  seed: int  # seed of every shuffle
  objective: Objective = CAUSAL
  first: int = 0  # input id at the start of each row and segment
  virtual: int = 0  # virtual positions before each document, or joined row
  neighbours: NeighbourIndex | None = None  # if layers attend to neighbours

  @property
  def fingerprint(self) -> str:
    """Hash of all that decides the rows except SEED, for checks on resuming."""
    parts = [self.packing, self.sequence_length]
    if self.packing.startswith("joined"):
      # Versions that did not shuffle documents must have a different hash.
      parts.append("shuffled documents")
    if self.first:
      parts.append(f"start {self.first}")
    if self.objective != CAUSAL:
      parts.append(to_json(self.objective))
    if self.virtual:
      parts.append(f"{self.virtual} virtual positions")
    if self.neighbours:
      _, count, *_ = self.neighbours.given
      parts += ["neighbours", count, self.neighbours.digest]
    for source, store in zip(self.sources, self.stores, strict=True):
      parts += [source.name, source.rate, store.fingerprint]
    return hash_parts(parts)

  @property
  def validation_bytes_per_token(self) -> float:
    """Bytes of validation text per token with a loss, for bits per byte."""
    # Weight each source by its rate, which is its share of validation rows.
    # Its share of tokens is the same, because rows have equally many tokens.
    return sum(
      source.rate * store.validation.bytes_per_token
      for source, store in zip(self.sources, self.stores, strict=True)
    )

  def batches(self, sizes: BatchSizes, skips: Skips | None = None) -> Batches:
    """Returns the training batches, except the batches that `skips` lists.

    Raises UserError if an epoch holds less than one batch.
    """
    rows = self._training_rows
    num_rows = rows.num_rows
    if num_rows < sizes.largest:
      tokens = sum(len(store.train.tokens) for store in self.stores)
      fix = "lower GLOBAL_BATCH_SIZE or SEQUENCE_LENGTH"
      if not num_rows:  # no document fits
        fix = "raise SEQUENCE_LENGTH"
      raise UserError(
        f"training text = {tokens:,} tokens, {num_rows:,} rows: less than one "
        f"batch, GLOBAL_BATCH_SIZE = {sizes.largest:,} rows of SEQUENCE_LENGTH "
        f"= {self.sequence_length:,} tokens; give more text, lower "
        f"VALIDATION_SHARE, or {fix}."
      )
    return Batches(rows, sizes, skips, self._before_rows)

  def validation_batches(
    self, *, batch_size: int, num_rows: int
  ) -> Iterator[Batch]:
    """Returns the validation batches, which begin at each source's first row.

    Every evaluation reads the same rows, neither shuffled nor repeated, at most
    `num_rows` in all. The batches end earlier if a source runs out of rows. A
    last batch that is not full is dropped.

    Raises UserError, before iteration, if there are too few rows for one batch.
    """
    sources = self._validation_rows
    mixture = Mixture([source.rate for source in sources], seed=self.seed)
    source, index = mixture.locate(np.arange(max(num_rows, batch_size)))
    available = np.array([s.rows.num_rows for s in sources])
    spent = np.flatnonzero(index >= available[source])
    usable = int(spent[0]) if len(spent) else len(source)
    if usable < batch_size:
      name = sources[source[usable]].name
      raise UserError(
        f"validation text of {name}: {available[source[usable]]:,} rows of "
        f"SEQUENCE_LENGTH tokens, less than its share of one batch of "
        f"{batch_size:,}; raise VALIDATION_SHARE, give more text, or lower "
        "GLOBAL_BATCH_SIZE."
      )
    features = _add_weights(list_features(sources), self._before_rows)
    places = list(zip(source.tolist(), index.tolist(), strict=True))
    return (
      _stack(
        [
          sources[s].rows.read(i) for s, i in places[start : start + batch_size]
        ],
        features,
        self._before_rows,
      )
      for start in range(0, usable - batch_size + 1, batch_size)
    )

  # Make the rows once, because WholeRows reads the lengths of all documents.
  @functools.cached_property
  def _training_rows(self) -> JoinedStream | MixedRows:
    if self.packing in ("packed", "single"):
      return MixedRows(self._rows("train"), seed=self.seed)
    for source, store in zip(self.sources, self.stores, strict=True):
      self._check_has_a_row(source, "train", store.train.tokens)
    return JoinedStream(
      [
        TokenSource(source.name, source.rate, store.train.tokens)
        for source, store in zip(self.sources, self.stores, strict=True)
      ],
      self.sequence_length - self.virtual,
      eod_id=self._segment_end,
      seed=self.seed,
      first=self.first,
      neighbours=self.neighbours,
    )

  def list_rows(self) -> list[WholeRows]:
    """Returns the training rows of each source, then the validation rows."""
    trained = self._training_rows
    assert isinstance(trained, MixedRows)
    sources = [*trained.sources, *self._validation_rows]
    return [x.rows for x in sources if isinstance(x.rows, WholeRows)]

  @functools.cached_property
  def _validation_rows(self) -> list[RowSource]:
    return self._rows("validation")

  @property
  def _before_rows(self) -> int:
    # Other rows have virtual positions before each of their documents.
    return self.virtual if self.packing == "joined" else 0

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
      length = self.sequence_length - self.virtual
      return JoinedRows(
        *(tokens, length),
        eod_id=self._segment_end,
        first=self.first,
        neighbours=self.neighbours,
      )
    rows = WholeRows(
      tokens,
      self.sequence_length,
      objective=self.objective,
      packed=self.packing == "packed",
      seed=self.seed,
      first=self.first,
      virtual=self.virtual,
      has_pairs=source.form in (PAIRS, PLAIN_PAIRS),
    )
    longer = f"longer than SEQUENCE_LENGTH = {self.sequence_length:,}"
    if source.form in (PAIRS, PLAIN_PAIRS):
      if rows.num_dropped:
        _logger.warning(
          f"{rows.num_dropped:,} pairs of {source.name} ({split}) are left "
          f"out: both answers, each after the prompt, are {longer}"
        )
    elif tokens.has_answers:
      if rows.num_cut or rows.num_dropped:
        _logger.warning(
          f"{rows.num_cut:,} conversations of {source.name} ({split}) are "
          f"{longer}: only turns that fit are used; {rows.num_dropped:,} are "
          "left out, because their first answer does not fit"
        )
    elif rows.num_cut:
      _logger.warning(
        f"{rows.num_cut:,} examples of {source.name} ({split}) are {longer}: "
        "the beginning of their inputs, or the end of their targets, is left "
        "out"
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

  Tokens that CACHE_DIR lacks are read from MODEL_DIR, or written there.

  Raises UserError if there is no text, a source has no document for training or
  for validation, a SeqIO task's token ids are from another vocabulary, its
  conversations cannot be encoded, or the disk is full.
  """
  data, sequence_length = config.data, config.model.sequence_length
  virtual = config.model.adapter_length or 0
  if virtual and data.packing == "joined_masked":
    raise UserError(
      f"ADAPTER = {config.model.adapter!r} and PACKING = {data.packing!r}: "
      "each document has virtual positions, so equally many tokens would not "
      'fill equal rows; set PACKING = "packed", "single" or "joined".'
    )
  sources = open_filtered(model_dir, data, sequence_length)
  _check_forms(sources, config.loss.preference_beta)
  conversations = open_conversations(data, sources, vocabulary)
  stores = load_stores(model_dir, data, sources, vocabulary, conversations)
  for source, store in zip(sources, stores, strict=True):
    _check_splits(source, store, data)
    if conversations and source.form != TEXTS:
      check_prompts(source, store, conversations)
  # Joined documents fill rows of any length. Warn of rows that are longer than
  # every document: they give no token more context from its own document.
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
    seed=config.run.seed_of_data,
    first=row_start(data, vocabulary),
    virtual=virtual,
    neighbours=open_neighbours(config, vocabulary),
  )


def open_neighbours(
  config: Config, vocabulary: Vocabulary
) -> NeighbourIndex | None:
  """Returns NEIGHBOUR_INDEX, or None; UserError if it does not fit the run."""
  path, model = config.data.neighbour_index, config.model
  if path is None:
    return None
  given = num_neighbours(model), model.chunk_length, vocabulary.sha256
  return NeighbourIndex(path, *given)


def _check_forms(sources: Sequence[Source], beta: float | None) -> None:
  """Raises UserError unless sources have pairs just if PREFERENCE_BETA is set.

  `beta` is PREFERENCE_BETA.
  """
  for source in sources:
    if beta is None and source.form in (PAIRS, PLAIN_PAIRS):
      raise UserError(
        f"PREFERENCE_BETA = None: {source.name} has pairs of a chosen and a "
        "rejected answer; set it to learn preferences, such as 0.1."
      )
    if beta is not None and source.form not in (PAIRS, PLAIN_PAIRS):
      raise UserError(
        f"PREFERENCE_BETA = {beta}: {source.name} has {source.form}, not pairs "
        "of a 'chosen' and a 'rejected' answer; give pairs, or set it to None."
      )


def _check_splits(source: Source, store: TokenStore, data: DataConfig) -> None:
  trained = store.train.counts.num_documents
  if trained and store.validation.counts.num_documents:
    return
  # Documents with a rank (a hash in [0, 1)) below VALIDATION_SHARE are held
  # out, so propose a share just above the lowest rank.
  enough = int(store.lowest_rank * 1000 + 1) / 1000
  fix = "give more text"
  if trained > 1 and enough <= 0.5:
    fix = f"set VALIDATION_SHARE = {enough} or give more text"
  raise UserError(
    f"VALIDATION_SHARE = {data.validation_share}: leaves no document of "
    f"{source.name} for {'validation' if trained else 'training'}; {fix}."
  )
