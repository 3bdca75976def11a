# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import collections
import dataclasses
import itertools

import pytest

from palm_mtf.config import DataConfig
from palm_mtf.config.run import BatchSizes
from palm_mtf.data.sources.document import Document
from palm_mtf.errors import UserError
from tests.data.small_sources import (
  ExampleSource,
  ListSource,
  corpus_of,
  load_corpus,
)
from tests.log_lines import without_stamps


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


def error(call, *arguments, **settings) -> str:
  with pytest.raises(UserError) as info:
    call(*arguments, **settings)
  assert "\n" not in str(info.value)
  return str(info.value)


def test_a_corpus_gives_batches_of_both_splits(load):
  corpus = load()
  batch = corpus.batches(BatchSizes(4)).batch(0)
  (held_out, *_) = corpus.validation_batches(batch_size=4, num_rows=8)
  assert batch["targets"].shape == held_out["targets"].shape == (4, 128)
  (source,) = corpus.stores
  assert corpus.validation_bytes_per_token == source.validation.bytes_per_token


def test_nothing_held_out_is_an_error_with_a_share_that_works(load):
  message = error(load, 0.001)
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
    assert error(load, share) == (
      f"VALIDATION_SHARE = {share}: leaves no document of text_files for "
      f"{split}; give more text."
    )


@pytest.mark.parametrize("packing", ["joined", "joined_masked"])
def test_less_than_one_row_is_an_error_with_the_numbers(load, packing):
  corpus = load(packing=packing, sequence_length=10**6)
  train = corpus.stores[0].train.counts.num_tokens
  assert error(corpus.batches, BatchSizes(1)) == (
    f"text_files, train = {train:,} tokens: less than one row; give more text, "
    "lower VALIDATION_SHARE, or lower SEQUENCE_LENGTH = 1,000,000."
  )
  validation = corpus.stores[0].validation.counts.num_tokens
  message = error(corpus.validation_batches, batch_size=1, num_rows=1)
  assert message == (
    f"text_files, validation = {validation:,} tokens: less than one row; give "
    "more text, raise VALIDATION_SHARE, or lower SEQUENCE_LENGTH = 1,000,000."
  )


def test_less_than_one_batch_is_an_error_with_the_numbers(load):
  corpus = load()
  tokens = corpus.stores[0].train.counts.num_tokens
  rows = tokens // 128
  assert error(corpus.batches, BatchSizes([[0, 1], [10, rows + 1]])) == (
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


def mixed(code, vocabulary, folder, **settings):
  """Returns a corpus of two sources with rates 0.75 and 0.25."""
  one = ListSource(code[:12], code[12:16], name="one", rate=0.75)
  two = ListSource(code[16:22], code[22:26], name="two", rate=0.25)
  return corpus_of([one, two], vocabulary, folder, **settings)


def test_tokens_of_a_mixture_come_and_its_bytes_are_weighted_by_the_rates(
  code, vocabulary, tmp_path
):
  corpus = mixed(code, vocabulary, tmp_path)
  batches = corpus.batches(BatchSizes(100))
  counts = collections.Counter()
  for step in range(100):
    for piece in itertools.chain(*batches.pieces(step)):
      counts[piece.source] += piece.tokens
  share = counts["one"] / counts.total()
  longest = max(s.train.counts.longest_document_tokens for s in corpus.stores)
  assert abs(share - 0.75) < 2 * longest / counts.total()
  one, two = (store.validation.bytes_per_token for store in corpus.stores)
  assert one != two
  assert corpus.validation_bytes_per_token == pytest.approx(
    0.75 * one + 0.25 * two
  )


def test_the_fingerprint_tells_all_that_decides_batches(
  code, vocabulary, tmp_path
):
  corpus = mixed(code, vocabulary, tmp_path)
  sources = [ListSource([], name="one", rate=0.5), corpus.sources[1]]
  others = [
    dataclasses.replace(corpus, packing="joined_masked"),
    dataclasses.replace(corpus, sequence_length=17),
    dataclasses.replace(corpus, stores=corpus.stores[::-1]),
    dataclasses.replace(corpus, sources=sources),
  ]
  fingerprints = {each.fingerprint for each in [corpus, *others]}
  assert len(fingerprints) == 5
  assert dataclasses.replace(corpus).fingerprint == corpus.fingerprint
