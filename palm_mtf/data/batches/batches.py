# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches, each a function of (SEED, step) alone.

A step has so many rows (config/batch_schedule.py), numbered through the run. A
row's number says which source it comes from and which of that source's rows it
is (mixture.py); these are shuffled within each epoch of the source:

  number          0 1 2 3 4 | 5 6 7 8 9 | 10 11 ...     one source of 5 rows
  epoch                   0 |         1 |         2
  row             3 0 4 2 1 | 1 4 0 3 2 | ...
  step 0, 1, ...  [2 a step: 3 0], [4 2], [1 1], [4 0], [3 2], ...

Nothing is replayed to reach a step, so a run resumes at once, and what number n
holds does not depend on batch sizes, pods or hosts: each of those reads its own
part of the batch, and the parts joined are the batch. shuffle.py is the
shuffle, packing.py says how documents fill rows.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf.config.batch_schedule import BatchSizes
from palm_mtf.config.skipped_batches import Skips
from palm_mtf.data.batches.mixture import Mixture
from palm_mtf.data.batches.packing import Row, Rows
from palm_mtf.data.batches.shuffle import permute
from palm_mtf.errors import UserError

Batch = dict[str, np.ndarray]

FEATURES = ("inputs", "targets", "segments", "loss_weights")


class RowSource(NamedTuple):
  """The rows of one source and its share of all."""

  name: str
  rate: float
  rows: Rows


class RowPlace(NamedTuple):
  """Where a row of a batch comes from."""

  source: str
  epoch: int
  row: int


class Batches:
  """The training batches of a run.

  Attributes:
    features: names of what a batch holds, in the order of FEATURES.
  """

  def __init__(
    self,
    sources: Sequence[RowSource],
    sizes: BatchSizes,
    *,
    seed: int,
    skips: Skips | None = None,
  ):
    """Mixes `sources` by their rates; leaves `skips` out."""
    self._skips = skips or Skips()
    self._sources = sources
    self._sizes = sizes
    self._seed = seed
    self._mixture = Mixture([source.rate for source in sources], seed=seed)
    self.features = features_of(sources)

  def batch(self, step: int, part: int = 0, num_parts: int = 1) -> Batch:
    """Returns the batch of a step, or the part of it that one pod takes.

    Args:
      step: counted from 0.
      part: which of `num_parts` equal parts, by rows, in order.
      num_parts: a divisor of the batch size of `step`.

    Returns:
      Each of `features`: [batch, length], int32; "loss_weights" float32.
    """
    places = self._places(step, part, num_parts)
    rows = [self._sources[s].rows.read(row) for s, _, row in places.tolist()]
    return _stack(rows, self.features)

  def places(self, step: int) -> list[RowPlace]:
    """Returns where each row of a step comes from."""
    return [
      RowPlace(self._sources[s].name, epoch, row)
      for s, epoch, row in self._places(step, 0, 1).tolist()
    ]

  def _places(self, step: int, part: int, num_parts: int) -> np.ndarray:
    """Returns source, epoch and row of each row of a part, [batch, 3]."""
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
    """Returns the epoch of each of a source's rows, and the row it reads."""
    epochs = source.rows.epoch(numbers)
    rows = np.empty_like(numbers)
    for epoch in np.unique(epochs).tolist():
      inside = epochs == epoch
      start = source.rows.epoch_start(epoch)
      size = source.rows.epoch_start(epoch + 1) - start
      key = f"seed {self._seed} source {source.name} epoch {epoch}"
      rows[inside] = start + permute(numbers[inside] - start, size, key)
    return np.stack([epochs, rows], axis=1)


def validation_batches(
  sources: Sequence[RowSource], *, batch_size: int, num_rows: int, seed: int
) -> Iterator[Batch]:
  """Returns the validation batches: each source's first rows, in order.

  There are `num_rows` rows in all, in whole batches, mixed by the rates of the
  sources, or as many as there are before a source has none left.

  Raises:
    UserError: there is less than one batch; raised at once.
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
  features = features_of(sources)
  return (
    _stack(
      [sources[source[i]].rows.read(int(index[i])) for i in range(start, end)],
      features,
    )
    for start in range(0, usable - batch_size + 1, batch_size)
    for end in [start + batch_size]
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
  """Returns what a batch of `sources` holds, in the order of FEATURES."""
  held = {name for source in sources for name in source.rows.features}
  return tuple(name for name in FEATURES if name in held)


def _stack(rows: Sequence[Row], features: Sequence[str]) -> Batch:
  length = len(rows[0]["targets"])
  # A row without segments is one; a row without weights is learnt as a whole.
  ones = {
    "segments": np.ones(length, np.int32),
    "loss_weights": np.ones(length, np.float32),
  }
  return {
    name: np.stack([row[name] if name in row else ones[name] for row in rows])
    for name in features
  }
