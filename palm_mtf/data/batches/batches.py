# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches of rows, each a function of (SEED, step) alone.

Rows are numbered through the run, as many a step as config/run.py
says; a RowStream reads a row by its number. So a run resumes at once, and no
row depends on batch sizes, pods or hosts.

Prefetching: a thread makes batches while a step runs.

The unigram entropy: the loss that a model without context cannot beat.
"""

import concurrent.futures
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from palm_mtf.config.run import BatchSizes
from palm_mtf.config.watch import Skips
from palm_mtf.data.batches.mixed_rows import Mixture, RowSource, features_of
from palm_mtf.data.batches.packing import FEATURES, Piece, Row, RowStream
from palm_mtf.errors import UserError

Batch = dict[str, np.ndarray]


class Batches:
  """The training batches of a run."""

  def __init__(
    self, rows: RowStream, sizes: BatchSizes, skips: Skips | None = None
  ):
    """Groups rows; leaves out the batches of `skips`."""
    self._rows = rows
    self._sizes = sizes
    self._skips = skips or Skips()
    self.features = rows.features  # of every batch

  def batch(self, step: int, part: int = 0, num_parts: int = 1) -> Batch:
    """Returns the batch of a step, or the part of it that one pod takes.

    Args:
      step: number of the step, from 0 on.
      part: number of the part, from 0 on.
      num_parts: number of equal parts, a divisor of the step's batch size.

    Returns:
      Each of `features`: [batch / num_parts, length], int32; "loss_weights"
      float32.
    """
    # Rows of this part alone are read from disk.
    rows = self._rows.read(self._numbers(step, part, num_parts))
    return _stack(rows, self.features)

  def pieces(self, step: int) -> list[list[Piece]]:
    """Returns the documents of each row of a step."""
    return self._rows.pieces(self._numbers(step, 0, 1))

  def _numbers(self, step: int, part: int, num_parts: int) -> np.ndarray:
    """Returns the number of each row of a part, [rows], int64."""
    part_rows = self._sizes.size(step) // num_parts
    first = self._sizes.rows_before(step) + part * part_rows
    return self._skips.rows(first + np.arange(part_rows), self._sizes)


def validation_batches(
  sources: Sequence[RowSource], *, batch_size: int, num_rows: int, seed: int
) -> Iterator[Batch]:
  """Returns the validation batches: the first rows of each source, in order.

  Args:
    sources: sources, mixed by their rates.
    batch_size: rows of a batch.
    num_rows: rows in all, cut to whole batches, and to those before a source
      has none left: no row is read twice.
    seed: seed of the mixture.

  Raises:
    UserError: there is less than one batch; raised at once.
  """
  # Neither shuffled nor repeated: every evaluation reads the same rows.
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
  features = features_of(sources)
  places = list(zip(source.tolist(), index.tolist(), strict=True))
  return (
    _stack(
      [sources[s].rows.read(i) for s, i in places[start : start + batch_size]],
      features,
    )
    for start in range(0, usable - batch_size + 1, batch_size)
  )


def split_batch(batch: Batch, num_parts: int) -> list[Batch]:
  """Returns the rows of a batch in `num_parts` equal parts, in order."""
  (size,) = {len(rows) for rows in batch.values()}
  assert size % num_parts == 0, f"{size} rows, {num_parts} parts"
  part = size // num_parts
  return [
    {name: rows[i : i + part] for name, rows in batch.items()}
    for i in range(0, size, part)
  ]


def batch_hash(batch: Batch) -> str:
  """Returns a hash of every number of a batch, in hexadecimal."""
  digest = hashlib.blake2b(digest_size=8)
  for name in FEATURES:
    if name in batch:
      digest.update(name.encode() + batch[name].tobytes())
  return digest.hexdigest()


def _stack(rows: Sequence[Row], features: Sequence[str]) -> Batch:
  length = len(rows[0]["targets"])
  # Sources of a mixture may lack features of others: a row without segments is
  # one segment, a row without weights is learnt as a whole.
  ones = {
    "segments": np.ones(length, np.int32),
    "loss_weights": np.ones(length, np.float32),
  }
  return {
    name: np.stack([row[name] if name in row else ones[name] for row in rows])
    for name in features
  }


class Prefetcher:
  """Prefetches the batches of the next steps; a context manager."""

  def __init__(
    self, batch_of: Callable[[int], Batch], last_step: int, depth: int
  ):
    # A batch is a function of its step alone, counted from 0: one that was made
    # early and is never read is no loss.
    self._batch_of, self._last_step, self._depth = batch_of, last_step, depth
    self._thread = concurrent.futures.ThreadPoolExecutor(1, "batches")
    self._made: dict[int, concurrent.futures.Future[Batch]] = {}

  def __enter__(self) -> "Prefetcher":
    return self

  def __exit__(self, *exception: object) -> None:
    self._thread.shutdown(cancel_futures=True)

  def batch(self, step: int) -> Batch:
    """Returns the batch of a step, and starts to make `depth` more."""
    for each in range(step, min(step + 1 + self._depth, self._last_step)):
      if each not in self._made:
        self._made[each] = self._thread.submit(self._batch_of, each)
    return self._made.pop(step).result()


def unigram_entropy(batches: Iterable[Batch]) -> float:
  """Returns the entropy of the distribution of learnt tokens, in nats."""
  # Of all distributions that ignore context, that of the tokens has the lowest
  # loss on them: a model with a lower loss has learnt from context.
  counts = np.zeros(0, np.int64)
  for batch in batches:
    learnt = batch["targets"]
    if "loss_weights" in batch:
      learnt = learnt[batch["loss_weights"] > 0]
    # A later batch may hold higher tokens than all before.
    new = np.bincount(learnt.ravel(), minlength=len(counts))
    new[: len(counts)] += counts
    counts = new
  shares = counts[counts > 0] / max(1, counts.sum())
  return float(-np.sum(shares * np.log(shares)))
