# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import dataclasses
import hashlib
import itertools
import shutil
import threading
import time
from concurrent import futures
from types import SimpleNamespace

import numpy as np
import pytest

from palm_mtf.config import DataConfig
from palm_mtf.config.run import BatchSizes
from palm_mtf.data import worker_pool
from palm_mtf.data.batches import row_streams
from palm_mtf.data.batches.corpus import (
  Batches,
  Corpus,
  Prefetcher,
  batch_hash,
  unigram_entropy,
)
from palm_mtf.data.batches.packing import (
  PrefixLM,
  SpanCorruptionLM,
  WholeRows,
)
from palm_mtf.data.batches.row_streams import (
  JoinedStream,
  MixedRows,
  RowSource,
  TokenSource,
)
from palm_mtf.data.batches.shuffle import shuffle
from palm_mtf.data.sources.document import Document
from palm_mtf.data.sources.text_files import Fields, TextFiles
from palm_mtf.data.tokens import encoder
from tests.data.small_sources import (
  ExampleSource,
  ListSource,
  corpus_of,
  load_corpus,
  numbered,
  token_array,
)
from tests.log_lines import without_stamps
from tests.refusals import message_of


@pytest.fixture
def load(folder, vocabulary, tmp_path):
  """Loads the corpus of the folder."""

  def load(share=0.2, sequence_length=128, **settings):
    data = DataConfig(
      text_files=f"{folder}/*.txt",
      vocabulary=None,
      validation_share=share,
      **settings,
    )
    return load_corpus(
      str(tmp_path / "run"),
      data,
      vocabulary=vocabulary,
      sequence_length=sequence_length,
      seed=0,
    )

  return load


def test_nothing_held_out_is_an_error_with_a_share_that_works(load):
  message = message_of(load, 0.001)
  assert message.startswith(
    "VALIDATION_SHARE = 0.001: leaves no document of text_files for validation;"
  )
  share = float(message.split("set VALIDATION_SHARE = ")[1].split()[0])
  assert load(share, 8).stores[0].validation.counts.num_documents == 1


def test_a_lone_document_asks_for_more_text(load, folder):
  ranks = {path: Document(path.read_text()).rank for path in folder.iterdir()}
  for path in sorted(folder.iterdir(), key=ranks.get)[1:]:
    path.unlink()
  for share, split in ((1e-4, "validation"), (0.5, "training")):
    assert message_of(load, share) == (
      f"VALIDATION_SHARE = {share}: leaves no document of text_files for "
      f"{split}; give more text."
    )


@pytest.mark.parametrize("packing", ["joined", "joined_masked"])
def test_less_than_one_row_is_an_error_with_the_numbers(load, packing):
  corpus = load(packing=packing, sequence_length=10**6)
  (store,) = corpus.stores
  for message, name, split, fix in (
    (message_of(corpus.batches, BatchSizes(1)), "train", store.train, "lower"),
    (
      message_of(corpus.validation_batches, batch_size=1, num_rows=1),
      "validation",
      store.validation,
      "raise",
    ),
  ):
    assert message == (
      f"text_files, {name} = {split.counts.num_tokens:,} tokens: less than one "
      f"row; give more text, {fix} VALIDATION_SHARE, or lower SEQUENCE_LENGTH "
      "= 1,000,000."
    )


def test_less_than_one_batch_is_an_error_with_the_numbers(load):
  corpus = load()
  tokens = corpus.stores[0].train.counts.num_tokens
  rows = tokens // 128
  assert message_of(corpus.batches, BatchSizes([[0, 1], [10, rows + 1]])) == (
    f"training text = {tokens:,} tokens, {rows:,} rows: less than one batch, "
    f"GLOBAL_BATCH_SIZE = {rows + 1:,} rows of SEQUENCE_LENGTH = 128 tokens; "
    "give more text, lower VALIDATION_SHARE, or lower GLOBAL_BATCH_SIZE or "
    "SEQUENCE_LENGTH."
  )
  assert corpus.batches(BatchSizes(rows)).batch(0)


@pytest.mark.parametrize("packing", ["joined", "joined_masked"])
def test_a_sequence_longer_than_any_document_is_told(load, capsys, packing):
  longest = load(0.5).stores[0].train.counts.longest_document_tokens
  capsys.readouterr()
  load(0.5, longest, packing=packing)
  assert capsys.readouterr().err == ""
  load(0.5, longest + 1, packing=packing)
  assert without_stamps(capsys.readouterr().err) == (
    f"palm_mtf: warning: SEQUENCE_LENGTH = {longest + 1:,} is longer than the "
    f"longest training document ({longest:,} tokens with [eod]): documents are "
    "joined, so training works, but no token learns from more than "
    f"{longest - 1:,} tokens of its document.\n"
  )


def test_examples_that_are_cut_are_told_once(vocabulary, tmp_path, capsys):
  documents = [Document("a b c", "many words " * i) for i in range(30)]
  source = ExampleSource(documents, documents[:8])
  corpus = corpus_of([source], vocabulary, tmp_path, packing="single")
  lengths = [
    len(vocabulary.encode(d.inputs)) + len(vocabulary.encode(d.text)) + 1
    for d in documents
  ]
  for _ in range(3):
    corpus.batches(BatchSizes(2))
    corpus.validation_batches(batch_size=2, num_rows=4)
  assert without_stamps(capsys.readouterr().err).splitlines() == [
    f"palm_mtf: warning: {sum(length > 16 for length in some)} examples of "
    f"source ({split}) are longer than SEQUENCE_LENGTH = 16: the beginning of "
    "their inputs, or the end of their targets, is left out"
    for some, split in ((lengths, "train"), (lengths[:8], "validation"))
  ]


def mixed_corpus(code, vocabulary, folder, **settings):
  """Returns a corpus of two sources with rates 0.75 and 0.25."""
  one = ListSource(code[:12], code[12:16], name="one", rate=0.75)
  two = ListSource(code[16:22], code[22:26], name="two", rate=0.25)
  return corpus_of([one, two], vocabulary, folder, **settings)


def test_bytes_of_a_mixture_are_weighted_by_the_rates(
  code, vocabulary, tmp_path
):
  corpus = mixed_corpus(code, vocabulary, tmp_path)
  one, two = (store.validation.bytes_per_token for store in corpus.stores)
  assert one != two
  assert corpus.validation_bytes_per_token == pytest.approx(
    0.75 * one + 0.25 * two
  )


def test_the_fingerprint_tells_all_that_decides_batches(
  code, vocabulary, tmp_path
):
  corpus = mixed_corpus(code, vocabulary, tmp_path)
  sources = [ListSource([], name="one", rate=0.5), corpus.sources[1]]
  spans = SpanCorruptionLM(0.15, 3.0, 1999, 1)
  others = [
    dataclasses.replace(corpus, packing="joined_masked"),
    dataclasses.replace(corpus, sequence_length=17),
    dataclasses.replace(corpus, stores=corpus.stores[::-1]),
    dataclasses.replace(corpus, sources=sources),
    *(
      dataclasses.replace(corpus, objective=x)
      for x in (PrefixLM(), spans, dataclasses.replace(spans, eod_id=9))
    ),
  ]
  fingerprints = {each.fingerprint for each in [corpus, *others]}
  assert len(fingerprints) == 8
  assert dataclasses.replace(corpus).fingerprint == corpus.fingerprint


LENGTH = 8
RAMP = [[0, 4], [3, 8], [7, 16]]


def batches(size=16, seed=0) -> Batches:
  source = TokenSource("source", 1.0, numbered([5, 11, 3, 40] * 14))
  stream = JoinedStream([source], LENGTH, eod_id=None, seed=seed)
  return Batches(stream, BatchSizes(size))


def mixed(size=8, seed=0) -> Batches:
  sources = [
    TokenSource("0", 0.7, numbered([5, 11, 3, 40] * 20)),
    TokenSource("1", 0.3, numbered([9] * 45, 10_000)),
  ]
  stream = JoinedStream(sources, LENGTH, eod_id=None, seed=seed)
  return Batches(stream, BatchSizes(size))


def whole(size=8, seed=0) -> Batches:
  sources = [
    RowSource(str(i), rate, single(count, 1000 * i))
    for i, (rate, count) in enumerate([(0.7, 150), (0.3, 50)])
  ]
  return Batches(MixedRows(sources, seed=seed), BatchSizes(size))


def single(count: int, first: int) -> WholeRows:
  """Returns rows of one document each, all different."""
  tokens = numbered([LENGTH] * count, first * LENGTH)
  return WholeRows(tokens, LENGTH, packed=False, seed=0)


def hashes(data, steps=range(12)) -> list[str]:
  return [batch_hash(data.batch(step)) for step in steps]


# A corpus on disk, read in every way that must not change a batch.


@pytest.fixture(scope="module")
def corpus(code, vocabulary, tmp_path_factory):
  """Makes the same corpus again, stored under other settings."""

  def make(packing="joined", seed=0, folder=None, **settings):
    home = tmp_path_factory.mktemp("corpus")
    folder = folder or home / "text"
    if not folder.exists():
      folder.mkdir()
      for i, text in enumerate(code[:12]):
        (folder / f"{i:02d}.txt").write_text(text, encoding="utf-8")
    files = TextFiles(
      f"{folder}/*.txt", Fields("text"), validation_share=0.2, name="files"
    )
    files.rate = 0.6
    lines = [text[i : i + 300] for text in code[:12] for i in (0, 400)]
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


@pytest.mark.parametrize(
  "packing", ["joined", "joined_masked", "packed", "single"]
)
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


@pytest.mark.parametrize("packing", ["joined", "packed"])
def test_neither_shards_nor_processes_nor_places_change_a_batch(
  corpus, packing, tmp_path, monkeypatch
):
  first = corpus(packing)
  expected = hashes(first.batches(BatchSizes(RAMP)))
  moved = tmp_path / "moved" / "deep"
  shutil.copytree(first.sources[0].files[0].path.rsplit("/", 1)[0], moved)
  monkeypatch.setattr(worker_pool, "_BATCHES_BEFORE_PROCESSES", 0)
  monkeypatch.setattr(encoder, "_BATCH_CHARACTERS", 5000)
  settings_of_stores = [
    {"shard_bytes": 1},
    {"shard_bytes": 30_000},
    {"folder": moved},
  ]
  if packing == "joined":  # packings see documents, not who encoded them
    settings_of_stores.append({"num_processes": 1})
  for settings in settings_of_stores:
    again = corpus(packing, **settings)
    assert hashes(again.batches(BatchSizes(RAMP))) == expected, settings


def test_another_seed_or_packing_gives_other_batches():
  makers = (batches, mixed, whole)
  found = [hashes(make(seed=seed)) for make in makers for seed in (0, 1)]
  assert len({each for run in found for each in run}) == 6 * 12


# Order: a function of only (SEED, step).


@pytest.mark.parametrize("make", [batches, mixed, whole])
def test_a_step_is_the_same_in_any_order_and_from_a_fresh_start(
  make, monkeypatch
):
  monkeypatch.setattr(row_streams, "_BLOCK_TOKENS", 200)  # many blocks
  data = make()
  forward = hashes(data)
  assert forward == hashes(data, reversed(range(12)))[::-1]
  assert forward == [hashes(make(), [step])[0] for step in range(12)]
  assert len(set(forward)) == 12


@pytest.mark.parametrize("make", [batches, mixed, whole])
def test_batch_sizes_only_group_the_rows(make):
  def rows(size, count=120):
    data, found, step = make(size=size), [], 0
    while sum(map(len, found)) < count:
      found.append(data.batch(step)["targets"])
      step += 1
    return np.concatenate(found)[:count]

  for size in (1, 7, 60, 120, [[0, 1], [3, 5], [9, 20]], RAMP):
    assert np.array_equal(rows(size), rows(24))


@pytest.mark.parametrize("make", [batches, mixed, whole])
def test_a_step_far_away_costs_no_more_than_the_first(make, monkeypatch):
  work = []

  def counted(index, size, key):
    work.append(index.size)
    return shuffle(index, size, key)

  monkeypatch.setattr(row_streams, "shuffle", counted)
  costs = []
  for step in (0, 10**9):
    work.clear()
    make().batch(step)
    costs.append((len(work), sum(work)))
  # A batch may touch the end of one epoch, or of one block.
  assert costs[1][0] <= costs[0][0] + 12
  assert costs[1][1] <= 2 * costs[0][1] + 10_000


def test_batches_never_change():
  # Resumed runs depend on exactly these numbers.
  digests = [
    hashlib.sha256("".join(hashes(make())).encode()).hexdigest()[:16]
    for make in (batches, mixed, whole)
  ]
  assert digests == [
    "576c16c7018c461a",
    "60f1bf34ab70f86d",
    "e6c8bb51110ea1c7",
  ]


def test_rows_without_a_feature_that_others_have_get_ones():
  examples = token_array([([5] * 3, [6] * 4)] * 20, has_inputs=True)
  sources = [
    RowSource("packed", 0.5, WholeRows(examples, LENGTH, packed=True, seed=0)),
    RowSource("single", 0.5, single(100, 9)),
  ]
  data = Batches(MixedRows(sources, seed=0), BatchSizes(20))
  assert data.features == ("inputs", "targets", "segments", "loss_weights")
  batch = data.batch(0)
  for i, (piece, *_) in enumerate(data.pieces(0)):
    if piece.source == "single":
      assert (batch["segments"][i] == 1).all()
  assert not batch["loss_weights"].all()
  assert batch["loss_weights"].dtype == np.float32
  assert batch["segments"].dtype == np.int32


# Validation.


def held_out(sizes, rates, batch_size, num_rows) -> list[list[int]]:
  """Returns the first token of each row: 8 per row, 10,000 per source."""
  tokens = (numbered([x * LENGTH], 10_000 * i) for i, x in enumerate(sizes))
  corpus = Corpus(
    sources=[SimpleNamespace(name=str(i), rate=x) for i, x in enumerate(rates)],
    stores=[
      SimpleNamespace(validation=SimpleNamespace(tokens=x)) for x in tokens
    ],
    packing="joined",
    sequence_length=LENGTH,
    eod_id=0,
    seed=0,
  )
  found = corpus.validation_batches(batch_size=batch_size, num_rows=num_rows)
  return [batch["targets"][:, 0].tolist() for batch in found]


def test_joined_rows_begin_with_virtual_positions(load):
  """The rest is a row that is so much shorter; nothing else has a loss."""
  corpus = load(packing="joined", sequence_length=20)
  virtual = dataclasses.replace(corpus, virtual=4)
  assert virtual.fingerprint != corpus.fingerprint
  short = dataclasses.replace(corpus, sequence_length=16)
  given = {"batch_size": 2, "num_rows": 4}
  for found, expected in zip(
    *(
      [x.batches(BatchSizes(2)).batch(3), *x.validation_batches(**given)]
      for x in (virtual, short)
    ),
    strict=True,
  ):
    assert (found.pop("loss_weights") == ([0] * 4 + [1] * 16)).all()
    assert found.keys() == expected.keys() == {"inputs", "targets"}
    for name, x in found.items():
      np.testing.assert_array_equal(x[:, 4:], expected[name])


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


@pytest.mark.parametrize(
  ("sizes", "rates", "batch_size", "of"),
  [([3], [1.0], 4, "0: 3"), ([500, 2], [0.5, 0.5], 100, "1: 2")],
)
def test_less_than_one_validation_batch_is_an_error_before_the_first(
  sizes, rates, batch_size, of
):
  assert message_of(held_out, sizes, rates, batch_size, 4) == (
    f"validation text of {of} rows of SEQUENCE_LENGTH tokens, less than its "
    f"share of one batch of {batch_size}; raise VALIDATION_SHARE, give more "
    "text, or lower GLOBAL_BATCH_SIZE."
  )


class CountedBatches:
  """Counts the batches that are made, and the threads that make them."""

  def __init__(self):
    self.made, self.threads = [], set()

  def batch(self, step):
    self.made.append(step)
    self.threads.add(threading.current_thread().name)
    return {"inputs": step}


def test_threads_that_ask_for_one_step_get_its_batch_which_is_made_once():
  batches, steps = CountedBatches(), range(200)
  with (
    Prefetcher(batches.batch, len(steps), depth=1) as ahead,
    futures.ThreadPoolExecutor(8) as threads,
  ):
    for step in steps:
      found = list(threads.map(ahead.batch, [step] * 8))
      assert found == [{"inputs": step}] * 8
  assert batches.made == [*steps]


def test_a_batch_that_failed_is_an_error_where_it_is_asked_for_then_made():
  errors = [OSError("the disk is away")]

  def batch_of(step):
    if step == 1 and errors:
      raise errors.pop()
    return step

  with Prefetcher(batch_of, 5, depth=3) as ahead:
    assert ahead.batch(0) == 0
    with pytest.raises(OSError, match="away"):
      ahead.batch(1)
    assert ahead.batch(1) == 1


def test_as_many_batches_as_asked_for_are_made_ahead_by_another_thread():
  batches = CountedBatches()
  with Prefetcher(batches.batch, 10, depth=2) as ahead:
    ahead.batch(0)
    assert ahead._made[2].result(timeout=10) == {"inputs": 2}
    assert 3 not in ahead._made
  assert threading.main_thread().name not in batches.threads


def test_the_end_waits_for_no_batch_that_is_not_begun():
  made = []

  def batch_of(step):
    time.sleep(0.02)
    made.append(step)

  with Prefetcher(batch_of, 1000, depth=500) as ahead:
    ahead.batch(0)
  assert len(made) < 100


def unigram_batches(tokens, size=7, **features):
  """Cuts `tokens`, [n], into batches like validation batches."""
  names = {"targets": tokens, **features}
  return (
    {name: values[i : i + size][None] for name, values in names.items()}
    for i in range(0, len(tokens), size)
  )


def test_the_entropy_is_that_of_the_learnt_tokens_of_all_batches():
  assert unigram_entropy([]) == 0.0
  assert unigram_entropy(unigram_batches(np.full(9, 7, np.int32))) == 0.0
  tokens = np.array([3, 3, 900, 900, 5, 5, 3, 3], np.int32)
  shares = np.array([4, 2, 2]) / 8
  entropy = -(shares * np.log(shares)).sum()
  assert unigram_entropy(unigram_batches(tokens, 2)) == pytest.approx(entropy)
  assert unigram_entropy(unigram_batches(tokens, 8)) == pytest.approx(entropy)
  weights = np.array([1, 1, 1, 1, 1, 1, 0, 0], np.float32)
  found = unigram_entropy(unigram_batches(tokens, 4, loss_weights=weights))
  assert found == pytest.approx(np.log(3))
