# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import hashlib
import itertools
import shutil

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from palm_mtf.config.batch_schedule import BatchSizes
from palm_mtf.data.batches import batches as batches_module
from palm_mtf.data.batches import mixture
from palm_mtf.data.batches.batches import (
  Batches,
  RowSource,
  batch_hash,
  validation_batches,
)
from palm_mtf.data.batches.packing import JoinedRows
from palm_mtf.data.batches.shuffle import shuffle
from palm_mtf.data.sources.text_files import TextFiles
from palm_mtf.data.tokens import encoder
from palm_mtf.data.tokens.array import Shard, TokenArray
from palm_mtf.errors import UserError
from tests.data.small_sources import (
  ListSource,
  corpus_of,
  repeatable,
  token_array,
)

LENGTH = 8
RAMP = [[0, 4], [3, 8], [7, 16]]


def joined(num_tokens, first=0) -> JoinedRows:
  tokens = first + np.arange(num_tokens, dtype="<u2")
  return JoinedRows(TokenArray([Shard(tokens)]), LENGTH, eod_id=None)


def batches(num_tokens=803, size=16, seed=0) -> Batches:
  source = RowSource("source", 1.0, joined(num_tokens))
  return Batches([source], BatchSizes(size), seed=seed)


def mixed(rates=(0.7, 0.3), sizes=(150, 50), size=8, seed=0) -> Batches:
  sources = [
    RowSource(f"{i}", rate, joined(rows * LENGTH, 10_000 * i))
    for i, (rate, rows) in enumerate(zip(rates, sizes, strict=True))
  ]
  return Batches(sources, BatchSizes(size), seed=seed)


def hashes(data, steps=range(12)) -> list[str]:
  return [batch_hash(data.batch(step)) for step in steps]


# A corpus on disk, read in every way that must not matter.


@pytest.fixture(scope="module")
def corpus(code, vocabulary, tmp_path_factory):
  """Makes the same corpus again, stored under other settings."""

  def make(packing="joined", seed=0, folder=None, **settings):
    home = tmp_path_factory.mktemp("corpus")
    folder = folder or home / "text"
    if not folder.exists():
      folder.mkdir()
      for i, text in enumerate(code[:20]):
        (folder / f"{i:02d}.txt").write_text(text, encoding="utf-8")
    files = TextFiles(f"{folder}/*.txt", validation_share=0.2, name="files")
    files.rate = 0.6
    lines = [text[i : i + 300] for text in code for i in (0, 400, 900)]
    other = ListSource(lines, lines[:3], name="lines", rate=0.4)
    return corpus_of(
      [files, other],
      vocabulary,
      home,
      packing=packing,
      seed=seed,
      sequence_length=64,
      **settings,
    )

  return make


PACKINGS = ("joined", "joined_masked", "packed", "single")


@pytest.mark.parametrize("packing", PACKINGS)
def test_parts_of_any_number_of_pods_joined_are_the_batch(corpus, packing):
  data = corpus(packing).batches(BatchSizes(RAMP))
  for step in range(12):
    whole = data.batch(step)
    for num_parts in (1, 2, 4):
      parts = [data.batch(step, part, num_parts) for part in range(num_parts)]
      again = {
        name: np.concatenate([part[name] for part in parts]) for name in whole
      }
      assert batch_hash(again) == batch_hash(whole)
      assert all(
        len(p["targets"]) * num_parts == len(whole["targets"]) for p in parts
      )


@pytest.mark.parametrize("packing", PACKINGS)
def test_neither_shards_nor_processes_nor_places_change_a_batch(
  corpus, packing, tmp_path, monkeypatch
):
  first = corpus(packing)
  expected = hashes(first.batches(BatchSizes(RAMP)))
  moved = tmp_path / "moved" / "deep"
  shutil.copytree(first.sources[0].files[0].path.rsplit("/", 1)[0], moved)
  monkeypatch.setattr(encoder, "_BATCHES_BEFORE_PROCESSES", 0)
  monkeypatch.setattr(encoder, "_BATCH_CHARACTERS", 5000)
  settings_of_stores = [
    {"shard_bytes": 1},
    {"shard_bytes": 30_000},
    {"folder": moved},
  ]
  if packing == "joined":  # packings see documents, not who encoded them
    settings_of_stores += [{"num_processes": n} for n in (1, 2)]
  for settings in settings_of_stores:
    again = corpus(packing, **settings)
    assert hashes(again.batches(BatchSizes(RAMP))) == expected, settings


def test_another_seed_or_packing_gives_other_batches(corpus):
  found = [
    hashes(corpus(packing, seed).batches(BatchSizes(8)))
    for packing in PACKINGS
    for seed in (0, 1)
  ]
  assert len({each for run in found for each in run}) == 8 * 12


# Order: a function of (SEED, step) alone.


def test_a_step_is_the_same_in_any_order_and_from_a_fresh_start():
  data = mixed()
  forward = hashes(data)
  assert forward == hashes(data, reversed(range(12)))[::-1]
  assert forward == [hashes(mixed(), [step])[0] for step in range(12)]
  assert len(set(forward)) == 12


@pytest.mark.parametrize("make", [batches, mixed])
def test_batch_sizes_only_group_the_rows(make):
  def rows(size, count=120):
    data, found, step = make(size=size), [], 0
    while sum(map(len, found)) < count:
      found.append(data.batch(step)["targets"])
      step += 1
    return np.concatenate(found)[:count]

  for size in (1, 7, 60, 120, [[0, 1], [3, 5], [9, 20]], RAMP):
    assert np.array_equal(rows(size), rows(24))


@hypothesis.given(st.integers(8, 200), st.integers(1, 9), st.integers(1, 4))
@repeatable(25)
def test_every_epoch_reads_every_token_once(num_tokens, size, num_epochs):
  data = batches(num_tokens, size)
  rows = joined(num_tokens)
  for epoch in range(num_epochs):
    first, end = rows.epoch_start(epoch), rows.epoch_start(epoch + 1)
    steps = range(first // size, -(-end // size))
    places = [p for step in steps for p in data.places(step)]
    begin = first - steps[0] * size
    places = places[begin : begin + end - first]
    assert sorted(p.row for p in places) == list(range(first, end))
    assert {p.epoch for p in places} == {epoch}
    # What an epoch's rows hold is as long a piece of the stream, unbroken.
    targets = np.concatenate([data.batch(step)["targets"] for step in steps])
    targets = targets[begin : begin + end - first]
    stream = np.arange(first * LENGTH, end * LENGTH) % num_tokens
    assert sorted(targets.ravel()) == sorted(stream)


def test_each_source_of_a_mixture_ends_an_epoch_before_the_next():
  data = mixed(rates=(0.7, 0.3), sizes=(30, 20))
  places = [p for step in range(100) for p in data.places(step)]
  for name, rows in (("0", 30), ("1", 20)):
    mine = [p for p in places if p.source == name]
    assert len(mine) > 150
    for start in range(0, len(mine) - rows, rows):
      epoch = mine[start : start + rows]
      assert {p.epoch for p in epoch} == {start // rows}
      assert len({p.row for p in epoch}) == rows


def test_every_epoch_seed_and_source_has_its_own_order():
  orders = {
    tuple(p.row % 64 for p in batches(64 * LENGTH, 64, seed).places(epoch))
    for seed in range(10)
    for epoch in range(10)
  }
  assert len(orders) == 100
  places = mixed((0.5, 0.5), (1000, 1000), size=2000).places(0)
  rows = [[p.row for p in places if p.source == name][:500] for name in "01"]
  assert rows[0] != rows[1]


def test_a_step_far_away_is_what_counting_there_would_give():
  size, far = 16, 10**9
  data = batches(800, size)
  for i, place in enumerate(data.places(far)):
    epoch, index = divmod(far * size + i, 100)
    key = f"seed 0 source source epoch {epoch}"
    assert place.epoch == epoch
    assert place.row == 100 * epoch + shuffle(np.array([index]), 100, key)[0]


@pytest.mark.parametrize("make", [batches, mixed])
def test_a_step_far_away_costs_no_more_than_the_first(make, monkeypatch):
  work = []

  def counted(index, size, key):
    work.append(index.size)
    return shuffle(index, size, key)

  for module in (batches_module, mixture):
    monkeypatch.setattr(module, "shuffle", counted)
  costs = []
  for step in (0, 10**9):
    work.clear()
    make().batch(step)
    costs.append((len(work), sum(work)))
  # A batch may touch the end of one epoch, or of one block.
  assert costs[1][0] <= costs[0][0] + 4
  assert costs[1][1] <= costs[0][1] + 10_000


def test_batches_never_change():
  # A resumed run depends on these very numbers.
  places = mixed(size=6, seed=1).places(7)
  assert {p.source for p in places} == {"0"}
  assert [p.row for p in places] == [125, 139, 95, 79, 49, 96]
  found = hashlib.sha256("".join(hashes(mixed())).encode()).hexdigest()
  assert found[:16] == "7eb3444d828512cf"


def test_rows_without_a_feature_that_others_have_get_ones():
  examples = token_array([([5] * 5, [6] * 6)] * 20, has_inputs=True)
  sources = [
    RowSource("texts", 0.5, joined(100 * LENGTH)),
    RowSource("examples", 0.5, JoinedRows(examples, LENGTH, eod_id=1)),
  ]
  data = Batches(sources, BatchSizes(20), seed=0)
  assert data.features == ("inputs", "targets", "segments", "loss_weights")
  batch = data.batch(0)
  for i, place in enumerate(data.places(0)):
    if place.source == "texts":
      assert (batch["segments"][i] == 1).all()
      assert (batch["loss_weights"][i] == 1).all()
  assert not batch["loss_weights"].all()
  assert batch["loss_weights"].dtype == np.float32
  assert batch["segments"].dtype == np.int32


# Validation.


def held_out(sizes, rates, batch_size, num_rows) -> list[list[int]]:
  """Returns the first token of each row: 8 a row, 10,000 a source."""
  sources = [
    RowSource(f"{i}", rate, joined(rows * LENGTH, 10_000 * i))
    for i, (rate, rows) in enumerate(zip(rates, sizes, strict=True))
  ]
  found = validation_batches(
    sources, batch_size=batch_size, num_rows=num_rows, seed=0
  )
  return [batch["targets"][:, 0].tolist() for batch in found]


@pytest.mark.parametrize(
  ("num_rows", "num_batches"), [(12, 4), (11, 3), (1, 1), (300, 6)]
)
def test_validation_batches_are_the_first_rows_in_order_in_whole_batches(
  num_rows, num_batches
):
  found = held_out([20], [1.0], batch_size=3, num_rows=num_rows)
  expected = [[8 * (3 * b + i) for i in range(3)] for b in range(num_batches)]
  assert found == expected


def test_validation_of_a_mixture_is_each_sources_first_rows_by_its_rate():
  found = list(itertools.chain(*held_out([60, 30], [0.75, 0.25], 4, 40)))
  assert len(found) == 40
  for source, rate in enumerate((0.75, 0.25)):
    mine = [f - 10_000 * source for f in found if f // 10_000 == source]
    assert mine == [8 * i for i in range(len(mine))]
    assert abs(len(mine) - 40 * rate) <= 5 * (40 * rate * (1 - rate)) ** 0.5


def test_validation_of_a_mixture_ends_where_a_source_has_no_row_left():
  found = list(itertools.chain(*held_out([1000, 5], [0.5, 0.5], 2, 1000)))
  small = [f for f in found if f >= 10_000]
  assert len(small) in (4, 5)  # the row beyond may be the second of a batch
  assert len(found) == len(set(found)) < 40


def test_less_than_one_validation_batch_is_an_error_before_the_first():
  with pytest.raises(UserError) as info:
    held_out([3], [1.0], batch_size=4, num_rows=4)
  assert str(info.value) == (
    "validation text of 0: 3 rows of SEQUENCE_LENGTH tokens, less than its "
    "share of one batch of 4; raise VALIDATION_SHARE, give more text, or lower "
    "GLOBAL_BATCH_SIZE."
  )
  with pytest.raises(UserError, match="validation text of 1: 2 rows"):
    held_out([500, 2], [0.5, 0.5], batch_size=100, num_rows=4)


def test_the_hash_tells_features_and_numbers_apart():
  batch = batches().batch(0)
  other = {**batch, "targets": batch["targets"].copy()}
  assert batch_hash(other) == batch_hash(batch)
  other["targets"][-1, -1] += 1
  assert batch_hash(other) != batch_hash(batch)
  assert batch_hash({"segments": batch["targets"]}) != batch_hash(
    {"targets": batch["targets"]}
  )
  assert batch_hash(dict(reversed(batch.items()))) == batch_hash(batch)
