# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Statistics of a corpus, and epochs counted as a run reads them."""

import collections
import functools
import json

import numpy as np
import pytest

from palm_mtf.commands.data_statistics import EpochLengths, epochs_of_run
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


def test_json_has_counts_duplicates_and_overlap(statistics, corpus, tmp_path):
  code, out, _ = statistics("--json")
  assert code == 0
  results = json.loads(out)
  everything = results["all"]
  assert results["sources"] == {"text_files": everything}
  files = sorted(corpus.iterdir())
  assert everything["documents"] == len(files) == 60
  assert everything["bytes"] == sum(path.stat().st_size for path in files)
  assert everything["tokens"] > 60 * 100
  assert 0 < everything["held_out_documents"] < 30
  assert everything["exact_documents"] == 5
  assert everything["exact_across"] == 0
  assert everything["near_groups"] == everything["near_texts"] == 1
  start = files[7].read_text()[:60]
  assert everything["largest_exact"] == [{"size": 6, "start": start}]
  (group,) = everything["largest_near"]
  assert group["size"] == 2
  assert group["start"] in {files[i].read_text()[:60] for i in (9, 59)}
  overlap = results["overlap"]["validation"]
  assert overlap["examples"] == everything["held_out_documents"]
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
    "8.33%",
    "1.67%",
    f"{everything['longest_bytes']:,}",
  ]
  assert (
    f"exact copies       5 documents, {everything['exact_bytes']:,} " in out
  )
  assert "\n  6 documents      'text 7\\n" in out
  assert "\n  groups           1, of texts" in out
  assert f"held out           {everything['held_out_documents']} doc" in out
  assert err == "", "the vocabulary is there and stderr is no terminal"


def test_another_evaluation_set_is_compared_with_the_training_text(
  statistics, corpus, tmp_path
):
  folder = tmp_path / "evaluation"
  folder.mkdir()
  (folder / "a.jsonl").write_text(
    "".join(
      json.dumps({"text": path.read_text()}) + "\n"
      for path in [*sorted(corpus.iterdir())[:54]]
    )
    + json.dumps({"text": "nothing of this was ever in any training text"})
  )
  macros = {"OVERLAP_FILES": f"{folder}/*.jsonl"}
  results = json.loads(statistics("--json", **macros)[1])
  overlap = results["overlap"]["OVERLAP_FILES"]
  assert overlap["examples"] == overlap["judged"] == 55
  held_out = results["all"]["held_out_documents"]
  assert 54 - held_out <= overlap["contaminated"] <= 54
  assert "\nOVERLAP_FILES      55 documents\n" in statistics(**macros)[1]


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
    ({"OVERLAP_FILES": "/no/*"}, "OVERLAP_FILES = '/no/*': "),
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
  assert results["all"]["exact_documents"] == 0
  assert results["filters"]["text_files"]["documents_read"] == 60
  assert results["filters"]["text_files"]["removed_exact_duplicates"] == 5
  _, out, _ = statistics(**filters)
  assert "filters            text_files\n  60 documents read\n" in out
  assert "filters" not in json.loads(statistics("--json")[1])
