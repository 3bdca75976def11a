# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import dataclasses
import functools
import itertools
import json

import numpy as np
import pytest
import sentencepiece

from palm_mtf.commands.data import describe_step
from palm_mtf.config import DataConfig
from palm_mtf.config.run import BatchSizes
from palm_mtf.data.batches.corpus import Batches, batch_hash
from palm_mtf.data.batches.packing import PrefixLM
from palm_mtf.data.sources.document import Document
from palm_mtf.data.vocabulary.load import open_vocabulary
from tests import runs
from tests.data.small_sources import (
  ExampleSource,
  ListSource,
  corpus_of,
  load_corpus,
)
from tests.prefixed_vocabulary import train_prefixed

EMOJI = "\U0001f600"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
  folder = runs.write_corpus(tmp_path_factory.mktemp("inspect") / "text")
  for i in range(10):
    (folder / f"emoji{i}.txt").write_text(f"{i} smile {EMOJI}\n{EMOJI}\n")
  return folder


@pytest.fixture
def inspect(texts, on_corpus):
  return functools.partial(on_corpus, "data inspect", texts)


@pytest.fixture
def vocabulary(inspect, tmp_path):
  inspect()
  return open_vocabulary(str(tmp_path / "run" / "vocabulary.model"))


def batches_of_training(texts, tmp_path, vocabulary, **settings) -> Batches:
  data = DataConfig(
    text_files=f"{texts}/*.txt",
    vocabulary=None,
    validation_share=0.2,
    **settings,
  )
  corpus = load_corpus(
    str(tmp_path / "run"),
    data,
    vocabulary=vocabulary,
    sequence_length=32,
    seed=0,
  )
  return corpus.batches(BatchSizes(4))


@pytest.mark.parametrize(
  "packing", ["joined", "joined_masked", "packed", "single"]
)
def test_the_figures_are_those_of_the_batch(
  inspect, texts, tmp_path, vocabulary, packing
):
  macros = {"PACKING": packing, "INSPECT_STEPS": [0, 7], "SEED": 0}
  code, out, _ = inspect("--json", INSPECT_ROWS=3, **macros)
  assert code == 0
  found = [json.loads(line) for line in out.splitlines()]
  assert [each["step"] for each in found] == [0, 7]
  batches = batches_of_training(texts, tmp_path, vocabulary, packing=packing)
  processor = sentencepiece.SentencePieceProcessor(model_file=vocabulary.path)
  for each in found:
    batch = batches.batch(each["step"])
    assert each["hash"] == batch_hash(batch)
    assert each["shape"] == [4, 32]
    assert each["features"] == list(batch)
    used = [i for i in batch["targets"].ravel().tolist() if i]
    assert each["eod_share"] == pytest.approx(used.count(1) / len(used))
    num_bytes = sum(map(processor.IsByte, used))
    assert each["byte_share"] == pytest.approx(num_bytes / len(used))
    assert each["learnt_share"] == len(used) / 128
    assert each["padding_share"] == 1 - len(used) / 128
    assert each["tokens_per_source"] == {"text_files": len(used)}
    pieces = batches.pieces(each["step"])
    assert len(each["rows"]) == 3
    for i, row in enumerate(each["rows"]):
      assert row["documents"] == [piece._asdict() for piece in pieces[i]]
      ids = [int(t) for t in batch["targets"][i] if t]
      assert sum(piece["tokens"] for piece in row["pieces"]) == len(ids)
      ends = sum(piece["ends_document"] for piece in row["pieces"])
      assert ends == ids.count(1)
      at = 0
      for piece in row["pieces"]:
        part = ids[at : at + piece["tokens"]]
        at += piece["tokens"]
        assert piece["text"] == vocabulary.decode(part)
        assert piece["ends_document"] == (part[-1] == 1)
        assert 1 not in part[:-1]
        assert piece["learnt"]


def test_the_hash_is_that_of_what_training_reads(
  inspect, texts, tmp_path, monkeypatch, capsys
):
  read = {}
  original = Batches.batch

  def recorded(self, step, *arguments):
    batch = original(self, step, *arguments)
    read[step] = batch_hash(batch)
    return batch

  monkeypatch.setattr(Batches, "batch", recorded)
  macros = {"TRAIN_STEPS": 4, "GLOBAL_BATCH_SIZE": [[0, 2], [2, 4]]}
  assert runs.run("train", texts, tmp_path / "run", PROMPTS=[], **macros) == 0
  capsys.readouterr()
  trained = dict(read)
  assert list(trained) == [0, 1, 2, 3]
  _, out, _ = inspect("--json", INSPECT_STEPS=[3, 0, 1, 2], **macros)
  found = [json.loads(line) for line in out.splitlines()]
  assert {each["step"]: each["hash"] for each in found} == trained


def test_people_see_documents_their_ends_and_the_figures(inspect, vocabulary):
  macros = {"PACKING": "single", "INSPECT_ROWS": 4, "GLOBAL_BATCH_SIZE": 60}
  _, out, _ = inspect(**macros)
  (found,) = map(json.loads, inspect("--json", **macros)[1].splitlines())
  lines = out.splitlines()
  assert lines[0] == "step 0: 60 rows of 32 tokens"
  assert lines[1] == (
    f"hash            {found['hash']} of inputs, targets, loss_weights"
  )
  for name in ("learnt_share", "padding_share", "eod_share", "byte_share"):
    assert f"{name:15} {100 * found[name]:.3f}%" in lines
  (tokens,) = found["tokens_per_source"].values()
  assert f"tokens          {tokens:,} of text_files" in lines
  shown = out[out.index("\nrow 0") :]
  expected = ""
  for number, row in enumerate(found["rows"]):
    expected += f"\nrow {number}:\n"
    for each in row["documents"]:
      expected += (
        f"  {each['tokens']:,} tokens of text_files, epoch 0, document "
        f"{each['document']:,}, from token {each['begin']:,}\n"
      )
    for piece in row["pieces"]:
      for line in piece["text"].split("\n"):
        expected += f"| {line}\n"
      expected += "[eod]\n" * piece["ends_document"]
  assert shown == expected + "\n"


def test_inputs_of_examples_are_marked_and_padding_is_not_shown(
  vocabulary, tmp_path
):
  documents = [Document("out", "in in in"), Document("longer out", "in")]
  source = ExampleSource(documents, documents)
  for packing in ("single", "packed"):
    corpus = corpus_of(
      [source], vocabulary, tmp_path / packing, packing=packing
    )
    batches = corpus.batches(BatchSizes(1))
    found = [describe_step(batches, step, vocabulary, 9) for step in (0, 1)]
    pieces = [
      p for each in found for row in each["rows"] for p in row["pieces"]
    ]
    told = {(p["text"], p["learnt"], p["ends_document"]) for p in pieces}
    assert told == {
      ("in in in", False, False),
      ("out", True, True),
      ("in", False, False),
      ("longer out", True, True),
    }
    for each in found:
      batch = batches.batch(each["step"])
      used = int((batch["targets"] > 0).sum())
      assert each["padding_share"] == 1 - used / 16
      assert each["learnt_share"] == batch["loss_weights"].sum() / 16


@pytest.mark.parametrize("packing", ["joined", "packed"])
def test_a_row_inside_a_document_keeps_the_space_of_its_first_word(
  tmp_path, packing
):
  vocabulary = train_prefixed("one two three", tmp_path)
  texts = ["one two three " * 9 + str(i) for i in range(3)]
  source = ListSource(texts, texts[:1])
  corpus = corpus_of([source], vocabulary, tmp_path / "c", packing=packing)
  batches = corpus.batches(BatchSizes(1))
  parts = {}
  for step in range(12 if packing == "joined" else 9):
    (row,) = describe_step(batches, step, vocabulary, 9)["rows"]
    if len(row["documents"]) == len(row["pieces"]):
      for place, piece in zip(row["documents"], row["pieces"], strict=True):
        parts[place["document"], place["begin"]] = piece["text"]
  assert any(begin for _, begin in parts)
  for (document, begin), text in parts.items():
    ids = vocabulary.encode(texts[document])
    before = vocabulary.decode(ids[:begin])
    assert texts[document].startswith(before + text)


def test_targets_that_continue_their_inputs_keep_the_space(tmp_path):
  vocabulary = train_prefixed("one two three", tmp_path)
  texts = ["one two three one two three"]
  corpus = corpus_of(
    [ListSource(texts, texts)], vocabulary, tmp_path / "c", packing="single"
  )
  corpus = dataclasses.replace(corpus, objective=PrefixLM())
  batches = corpus.batches(BatchSizes(1))
  (row,) = describe_step(batches, 0, vocabulary, 9, {"source"})["rows"]
  assert len(row["pieces"]) == 2  # inputs and targets
  assert "".join(piece["text"] for piece in row["pieces"]) == texts[0]


def test_tokens_of_a_mixture_are_counted_by_their_sources(vocabulary, tmp_path):
  texts = ["in out " * (i + 9) for i in range(20)]
  sources = [
    ListSource(texts, texts, name="one", rate=0.5),
    ListSource(texts[::2], texts, name="two", rate=0.3),
    ListSource(texts[::3], texts, name="three", rate=0.2),
  ]
  corpus = corpus_of(sources, vocabulary, tmp_path)
  batches = corpus.batches(BatchSizes(20))
  found = describe_step(batches, 3, vocabulary, 20)
  pieces = list(itertools.chain(*batches.pieces(3)))
  assert found["tokens_per_source"] == {
    name: sum(piece.tokens for piece in pieces if piece.source == name)
    for name in ("one", "two", "three")
  }
  assert sum(found["tokens_per_source"].values()) == 20 * 16
  assert found["padding_share"] == 0
  assert np.isclose(found["learnt_share"], 1)


@pytest.mark.parametrize(
  ("macros", "message"),
  [
    ({"INSPECT_STEPS": [-1]}, "INSPECT_STEPS = -1: give a whole number of at"),
    ({"GLOBAL_BATCH_SIZE": 10**6}, "training text = "),
  ],
)
def test_what_cannot_work_is_one_line(inspect, macros, message):
  code, out, err = inspect(**macros)
  assert (code, out) == (2, "")
  assert err.splitlines()[-1].startswith(f"palm_mtf: {message}")
