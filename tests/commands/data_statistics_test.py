# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Statistics of a corpus, and epochs counted as a run reads them."""

import collections
import functools
import json

import numpy as np
import pytest

from palm_mtf.commands.data_statistics import (
  EpochLengths,
  TextCounts,
  epochs_of_run,
  survey,
)
from palm_mtf.config import DataConfig, StatisticsConfig
from palm_mtf.config.run import BatchSizes
from palm_mtf.data.batches.packing import CAUSAL
from palm_mtf.data.sources.document import Document
from palm_mtf.data.tokens.encoder import Encoder
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.training import train_vocabulary
from tests import runs
from tests.data.small_sources import ExampleSource, ListSource, corpus_of
from tests.log_lines import without_stamps
from tests.mtf_testing import small_config

SIZES, STEPS, LENGTH = BatchSizes([[0, 20], [30, 40]]), 100, 24


def documents(count, seed, *, examples=False):
  """Returns texts of any length below a row; some are repeated."""
  rng = np.random.default_rng(seed)
  return [
    Document(
      "ab " * int(rng.integers(1, 6)),
      inputs="c " * int(rng.integers(1, 4)) if examples else None,
      weight=float(rng.choice([1.0, 1.0, 0.5, 2.0])),
    )
    for _ in range(count)
  ]


@pytest.fixture
def vocabulary(tmp_path):
  path = str(tmp_path / "vocabulary.model")
  train_vocabulary(["ab c never read in training\n" * 20], 290, path=path)
  return open_vocabulary(path)


def settings(packing) -> StatisticsConfig:
  return StatisticsConfig(
    model=small_config(sequence_length=LENGTH),
    data=DataConfig(
      text_files="{stdlib}",
      vocabulary=None,
      validation_share=0.1,
      packing=packing,
    ),
    train_steps=STEPS,
    global_batch_size=SIZES.pairs,
    seed=3,
  )


@pytest.mark.parametrize(
  "packing", ["joined", "joined_masked", "packed", "single"]
)
def test_epochs_are_those_of_the_rows_that_a_run_reads(
  packing, vocabulary, tmp_path
):
  held_out = ["never read in training"] * 9
  sources = [
    ListSource(documents(300, 0), held_out, name="large", rate=0.7),
    ExampleSource(
      documents(40, 1, examples=True), held_out, name="small", rate=0.3
    ),
  ]
  lengths = [EpochLengths() for _ in sources]
  with Encoder(vocabulary) as encoder:
    for source, each in zip(sources, lengths, strict=True):
      for split, document, counts in encoder.count(source.documents()):
        if split == "train":
          each.add(document, *counts)
  found = epochs_of_run(sources, lengths, settings(packing), CAUSAL)
  corpus = corpus_of(
    sources,
    vocabulary,
    tmp_path,
    packing=packing,
    sequence_length=LENGTH,
    seed=3,
  )
  batches, read = corpus.batches(SIZES), collections.Counter()
  for step in range(STEPS):
    for row in batches.pieces(step):
      for piece in row:
        read[piece.source] += piece.tokens
  for source, store in zip(sources, corpus.stores, strict=True):
    reading = found[source.name]
    tokens = len(store.train.tokens)
    assert reading.epoch_tokens == tokens
    # All documents fit into a row: each epoch reads all of its tokens.
    assert reading.epochs == pytest.approx(read[source.name] / tokens, rel=0.03)
  assert found["large"].rate == pytest.approx(0.7, abs=1e-4)
  assert found["small"].epochs > 2 * found["large"].epochs > 2


def test_a_source_without_training_documents_has_no_epochs():
  found = epochs_of_run(
    [ListSource([], ["a"])], [EpochLengths()], settings("packed"), CAUSAL
  )
  assert found["source"] == (1.0, 0, None)


@pytest.fixture
def corpus(tmp_path):
  """60 texts of random words, with five exact copies and one near copy."""
  folder = tmp_path / "corpus"
  folder.mkdir()
  rng = np.random.default_rng(0)
  texts = [
    f"text {i}\n" + " ".join(rng.choice(runs.WORDS, 200)) for i in range(54)
  ]
  texts += [texts[7]] * 5 + [texts[9].replace("text 9\n", "other 9\n")]
  for number, text in enumerate(texts):
    (folder / f"{number:02d}.txt").write_text(text)
  return folder


@pytest.fixture
def statistics(corpus, on_corpus):
  return functools.partial(on_corpus, "data statistics", corpus)


def test_json_has_the_counts_of_the_files(statistics, corpus, tmp_path):
  code, out, _ = statistics("--json")
  assert code == 0
  results = json.loads(out)
  everything = results["all"]
  assert results["sources"] == {"text_files": everything}
  files = sorted(corpus.iterdir())
  sizes = [path.stat().st_size for path in files]
  assert everything["documents"] == len(files) == 60
  assert everything["bytes"] == sum(sizes)
  assert everything["tokens"] > 60 * 100
  assert 0 < everything["held_out_documents"] < 30
  assert everything["longest_bytes"] == max(sizes)
  longest = files[sizes.index(max(sizes))].read_text()
  assert everything["longest_start"] == longest[:60]
  assert (tmp_path / "run" / "vocabulary.model").exists()


def test_the_table_says_the_same(statistics):
  everything = json.loads(statistics("--json")[1])["all"]
  code, out, err = statistics()
  assert code == 0
  lines = out.splitlines()
  assert lines[0].split("  ")[0] == "source"
  assert lines[1].split() == [
    "text_files",
    "60",
    f"{everything['bytes']:,}",
    f"{everything['tokens']:,}",
    f"{everything['held_out_documents'] / 0.6:.2f}%",
    f"{everything['longest_bytes']:,}",
  ]
  assert f"held out           {everything['held_out_documents']} doc" in out
  assert err == "", "the vocabulary is there and stderr is no terminal"


def test_counts_are_those_of_each_source_and_of_all(vocabulary):
  code = [f"{'ab ' * n}c" for n in (1, 2, 9, 4, 5, 6, 30, 8, 3)]
  one = ListSource(code[:4], code[4:6], name="one")
  two = ListSource(code[6:], name="two")
  with Encoder(vocabulary) as encoder:
    result = survey([one, two], encoder.count)
  tokens = [len(vocabulary.encode(text)) + 1 for text in code]
  sizes = [len(text.encode()) for text in code]
  assert result.sources["one"] == TextCounts(
    documents=6,
    bytes=sum(sizes[:6]),
    tokens=sum(tokens[:6]),
    held_out_documents=2,
    held_out_bytes=sum(sizes[4:6]),
    longest_bytes=sizes[2],
    longest_start=code[2],
  )
  total, second = result.total, result.sources["two"]
  assert total.documents == 9
  assert total.tokens == sum(tokens)
  assert second.bytes == sum(sizes[6:])
  assert (total.longest_bytes, total.longest_start) == (sizes[6], code[6][:60])
  assert (total.held_out_documents, second.held_out_documents) == (2, 0)


def test_where_no_vocabulary_can_be_trained_tokens_are_not_counted(statistics):
  code, out, err = statistics(VOCAB_SIZE=99_999)
  assert code == 0
  assert "not counted" in out.splitlines()[1]
  assert (
    without_stamps(err)
    .splitlines()[-1]
    .startswith(
      "palm_mtf: warning: tokens are not counted: VOCAB_SIZE = 99999: too high"
    )
  )


@pytest.mark.parametrize(
  ("macros", "line"),
  [
    ({"TRAIN_STEPS": 0}, "TRAIN_STEPS = 0: give a whole number of at least 1"),
    ({"VOCABULARY": "none.model"}, "VOCABULARY = 'none.model': no such file"),
    ({"TEXT_FILES": "/no/*"}, "TEXT_FILES = '/no/*': "),
  ],
)
def test_what_cannot_be_read_is_one_line(statistics, macros, line):
  code, out, err = statistics(**macros)
  assert (code, out) == (2, "")
  assert err.startswith(f"palm_mtf: {line}")
  assert err.count("\n") == 1


def test_the_epochs_of_a_run_follow_from_its_steps_rows_and_tokens(statistics):
  run = {"TRAIN_STEPS": 30, "GLOBAL_BATCH_SIZE": [[0, 4], [10, 8]]}
  results = json.loads(statistics("--json", **run)[1])
  (reading,) = results["epochs"].values()
  # An epoch reads each token of the training documents once; most documents are
  # training documents.
  assert 0.7 < reading["epoch_tokens"] / results["all"]["tokens"] < 1
  tokens = (10 * 4 + 20 * 8) * runs.SETTINGS["SEQUENCE_LENGTH"]
  assert reading["epochs"] == pytest.approx(tokens / reading["epoch_tokens"])
  assert reading["rate"] == 1
  _, out, _ = statistics(**run)
  assert (
    "\nepochs             30 steps read 200 rows of 32 tokens\n"
    f"  {reading['epochs']:<16.2f} text_files: {reading['epoch_tokens']:,} "
    "training tokens, rate 1\n"
  ) in out
  assert "epochs" not in json.loads(statistics("--json", TRAIN_STEPS=None)[1])


def test_what_filters_remove_is_counted_apart(statistics):
  filters = {"REMOVE_DUPLICATES": "exact", "MIN_DOCUMENT_BYTES": 10}
  results = json.loads(statistics("--json", **filters)[1])
  assert results["all"]["documents"] == 55
  assert results["filters"]["text_files"]["documents_read"] == 60
  assert results["filters"]["text_files"]["removed_exact_duplicates"] == 5
  _, out, _ = statistics(**filters)
  assert "filters            text_files\n  60 documents read\n" in out
  assert "filters" not in json.loads(statistics("--json")[1])
