# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches of rows, each computed from SEED and the step number, without state.

The rows of a run are numbered. config/run.py gives the number of rows per step,
and a RowStream reads a row by its number. So a run resumes without reading
earlier rows, and no row depends on batch sizes, pods or hosts.
"""

import concurrent.futures
import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from palm_mtf.config.run import BatchSizes
from palm_mtf.config.watch import Skips
from palm_mtf.data.batches.mixed_rows import Mixture, RowSource, list_features
from palm_mtf.data.batches.packing import FEATURES, Piece, Row
from palm_mtf.errors import UserError

Batch = dict[str, np.ndarray]  # from names in FEATURES to [batch, length]


class RowStream(Protocol):
  """The training rows of a run; a row depends only on its number.

  Both methods take row numbers, [n], int64, which count from the run's start.
  """

  features: tuple[str, ...]  # names in a batch, in the order of FEATURES
  num_rows: int  # rows per epoch, summed over all sources

  def read(self, numbers: np.ndarray) -> list[Row]:
    """Returns each row's features, [length], int32; loss_weights: float32."""

  def pieces(self, numbers: np.ndarray) -> list[list[Piece]]:
    """Returns, for each row, the pieces of documents in it, in order."""


class Batches:
  """The training batches of a run."""

  def __init__(
    self, rows: RowStream, sizes: BatchSizes, skips: Skips | None = None
  ):
    """Groups rows into batches; leaves out the batches that `skips` lists."""
    self._rows = rows
    self._sizes = sizes
    self._skips = skips or Skips()
    self.features = rows.features

  def batch(self, step: int, part: int = 0, num_parts: int = 1) -> Batch:
    """Returns the batch of a step, or one of `num_parts` equal parts of it.

    Steps and parts count from 0. Each pod reads another part.

    Returns:
      An array for each of `features`, [batch / num_parts, length], int32;
      "loss_weights" is float32.
    """
    rows = self._rows.read(self._row_numbers(step, part, num_parts))
    return _stack(rows, self.features)

  def pieces(self, step: int) -> list[list[Piece]]:
    """Returns the pieces of documents in each row of a step's batch."""
    return self._rows.pieces(self._row_numbers(step, 0, 1))

  def _row_numbers(self, step: int, part: int, num_parts: int) -> np.ndarray:
    part_rows = self._sizes.size(step) // num_parts
    first = self._sizes.rows_before(step) + part * part_rows
    return self._skips.rows(first + np.arange(part_rows), self._sizes)


def validation_batches(
  sources: Sequence[RowSource], *, batch_size: int, num_rows: int, seed: int
) -> Iterator[Batch]:
  """Returns the validation batches, which begin at each source's first row.

  Every evaluation reads the same rows, which are neither shuffled nor repeated.

  Args:
    sources: sources, mixed in proportion to their rates.
    num_rows: maximum number of rows in all batches. The batches end earlier if
      a source runs out of rows. A last batch that is not full is dropped.
    seed: seed of the order in which sources alternate.

  Raises:
    UserError: there are too few rows for one batch; raised before iteration.
  """
  mixture = Mixture([source.rate for source in sources], seed=seed)
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
  features = list_features(sources)
  places = list(zip(source.tolist(), index.tolist(), strict=True))
  return (
    _stack(
      [sources[s].rows.read(i) for s, i in places[start : start + batch_size]],
      features,
    )
    for start in range(0, usable - batch_size + 1, batch_size)
  )


def split_batch(batch: Batch, num_parts: int) -> list[Batch]:
  """Splits a batch into `num_parts` equal parts of consecutive rows."""
  parts = zip(*(np.split(x, num_parts) for x in batch.values()), strict=True)
  return [dict(zip(batch, part, strict=True)) for part in parts]


def batch_hash(batch: Batch) -> str:
  """Returns a hash of all values in a batch, in hexadecimal."""
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
  """A context manager that makes the batches of the next steps in a thread."""

  def __init__(
    self, batch_of: Callable[[int], Batch], last_step: int, depth: int
  ):
    self._batch_of, self._last_step, self._depth = batch_of, last_step, depth
    self._thread = concurrent.futures.ThreadPoolExecutor(1, "batches")
    self._made: dict[int, concurrent.futures.Future[Batch]] = {}

  def __exit__(self, *exception: object) -> None:
    self._thread.shutdown(cancel_futures=True)

  def batch(self, step: int) -> Batch:
    """Returns a step's batch, and starts to make the next `depth` batches."""
    for each in range(step, min(step + 1 + self._depth, self._last_step)):
      if each not in self._made:
        self._made[each] = self._thread.submit(self._batch_of, each)
    return self._made.pop(step).result()


def _stack(rows: Sequence[Row], features: Sequence[str]) -> Batch:
  length = len(rows[0]["targets"])
  # The sources of a mixture may have different features. A row without
  # "segments" is one segment; a row without "loss_weights" has weights of 1.
  ones = {
    "segments": np.ones(length, np.int32),
    "loss_weights": np.ones(length, np.float32),
  }
  return {
    name: np.stack([row[name] if name in row else ones[name] for row in rows])
    for name in features
  }
