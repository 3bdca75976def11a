# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches of rows, each a function of (SEED, step) alone.

Rows are numbered through the run, as many a step as config/batch_schedule.py
says. mixture.py maps a row's number to a source and a number among the rows of
that source; these are shuffled within each epoch of the source:

  number          0 1 2 3 4 | 5 6 7 8 9 | 10 11 ...     one source of 5 rows
  epoch                   0 |         1 |         2
  row             3 0 4 2 1 | 1 4 0 3 2 | ...
  step 0, 1, ...  [2 a step: 3 0], [4 2], [1 1], [4 0], [3 2], ...

A run resumes at once: no row depends on batch sizes, pods, hosts or the rows
before. packing.py fills rows with documents.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf.config.batch_schedule import BatchSizes
from palm_mtf.config.skipped_batches import Skips
from palm_mtf.data.batches.mixture import Mixture
from palm_mtf.data.batches.packing import Row, Rows
from palm_mtf.data.batches.shuffle import shuffle
from palm_mtf.errors import UserError

Batch = dict[str, np.ndarray]

FEATURES = ("inputs", "targets", "segments", "loss_weights")


class RowSource(NamedTuple):
  """The rows of one source and its share of all rows."""

  name: str
  rate: float
  rows: Rows


class RowPlace(NamedTuple):
  """The place of a row of a batch among the rows of its source."""

  source: str  # name
  epoch: int
  row: int  # number, for `Rows.read`


class Batches:
  """The training batches of a run."""

  def __init__(
    self,
    sources: Sequence[RowSource],
    sizes: BatchSizes,
    *,
    seed: int,
    skips: Skips | None = None,
  ):
    """Mixes sources by their rates; leaves out the batches of `skips`."""
    self._skips = skips or Skips()
    self._sources = sources
    self._sizes = sizes
    self._seed = seed
    self._mixture = Mixture([source.rate for source in sources], seed=seed)
    self.features = features_of(sources)  # of every batch

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
    places = self._places(step, part, num_parts)
    rows = [self._sources[s].rows.read(row) for s, _, row in places.tolist()]
    return _stack(rows, self.features)

  def places(self, step: int) -> list[RowPlace]:
    """Returns the place of each row of a step."""
    return [
      RowPlace(self._sources[s].name, epoch, row)
      for s, epoch, row in self._places(step, 0, 1).tolist()
    ]

  def _places(self, step: int, part: int, num_parts: int) -> np.ndarray:
    """Returns source, epoch and row of each row of a part, [rows, 3]."""
    part_rows = self._sizes.size(step) // num_parts
    first = self._sizes.rows_before(step) + part * part_rows
    numbers = self._skips.rows(first + np.arange(part_rows), self._sizes)
    sources, index = self._mixture.locate(numbers)
    places = np.empty([part_rows, 3], np.int64)
    for s in np.unique(sources):
      mine = sources == s
      places[mine, 0] = s
      places[mine, 1:] = self._shuffled(self._sources[s], index[mine])
    return places

  def _shuffled(self, source: RowSource, numbers: np.ndarray) -> np.ndarray:
    """Returns the epoch of each number, and the row that it reads, [n, 2]."""
    # A step touches one epoch of a source, or two, or many of a tiny source.
    epochs = source.rows.epoch(numbers)
    rows = np.empty_like(numbers)
    for epoch in np.unique(epochs).tolist():
      inside = epochs == epoch
      start = source.rows.epoch_start(epoch)
      size = source.rows.epoch_start(epoch + 1) - start
      key = f"seed {self._seed} source {source.name} epoch {epoch}"
      rows[inside] = start + shuffle(numbers[inside] - start, size, key)
    return np.stack([epochs, rows], axis=1)


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


def features_of(sources: Sequence[RowSource]) -> tuple[str, ...]:
  """Returns the features of a batch, in the order of FEATURES."""
  held = {name for source in sources for name in source.rows.features}
  return tuple(name for name in FEATURES if name in held)


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
