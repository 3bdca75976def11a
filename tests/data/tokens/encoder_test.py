# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import multiprocessing
import os
import signal

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from palm_mtf.data.sources.document import TRAIN, VALIDATION, Document, cut_text
from palm_mtf.data.tokens.encoder import Encoder
from palm_mtf.errors import UserError
from tests import processes
from tests.data.processes import peak_memory
from tests.data.small_sources import repeatable
from tests.prefixed_vocabulary import train_prefixed

# Small parts and batches, so that short documents have many of both.
_PART = 12

_texts = st.text(
  st.one_of(
    st.characters(exclude_categories=["Cs"]), st.sampled_from("\u2581\n \tabc1")
  ),
  max_size=60,
)
_ids = st.lists(st.integers(2, 60_000), max_size=60).map(np.array)
_documents = st.lists(
  st.tuples(
    st.sampled_from([TRAIN, VALIDATION]),
    st.builds(
      Document,
      st.one_of(_texts, _ids),
      st.one_of(st.none(), _texts, _ids),
      st.floats(0, 3),
      conversation=st.none(),
    ),
  ),
  max_size=12,
)

MODULE = "palm_mtf.data.tokens.encoder"
POOL = "palm_mtf.data.worker_pool"


@pytest.fixture(params=[0, 2])
def encoder(request, vocabulary, monkeypatch):
  """Returns an encoder with some processes, and small parts and batches."""
  monkeypatch.setattr(f"{MODULE}._PART_CHARACTERS", _PART)
  monkeypatch.setattr(f"{MODULE}._BATCH_CHARACTERS", 40)
  monkeypatch.setattr(f"{MODULE}._DOCUMENT_CHARACTERS", 1)
  monkeypatch.setattr(f"{POOL}._BATCHES_BEFORE_PROCESSES", 2)
  with Encoder(vocabulary, request.param) as encoder:
    yield encoder


def encoded_by_hand(vocabulary, text, part=_PART) -> list[int]:
  if not isinstance(text, str):
    return text.tolist()
  parts = cut_text(text, part)
  return [i for part in parts for i in vocabulary.encode(part)]


@hypothesis.given(_documents)
@repeatable(40)
def test_any_documents_have_the_ids_of_their_parts_in_order(
  encoder, vocabulary, documents
):
  encoded = list(encoder.encode(iter(documents)))
  assert len(encoded) == len(documents)
  for one, (split, document) in zip(encoded, documents, strict=True):
    assert one.split == split
    assert one.document is document
    inputs = "" if document.inputs is None else document.inputs
    for ids, text in ((one.text, document.text), (one.inputs, inputs)):
      assert ids.tolist() == encoded_by_hand(vocabulary, text)
      assert ids.dtype == np.int32


def many():
  for _ in range(2000):
    yield TRAIN, Document("some words, and some more\n" * 100)


def test_a_killed_worker_process_is_an_error_that_says_so(
  vocabulary, monkeypatch
):
  monkeypatch.setattr(f"{POOL}._BATCHES_BEFORE_PROCESSES", 0)
  with pytest.raises(UserError) as info, Encoder(vocabulary, 1) as encoder:
    for number, _ in enumerate(encoder.encode(many())):
      if number == 2:
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
  assert str(info.value) == (
    "a process that encodes text was killed, as happens when memory runs out; "
    "free some and start again: what is encoded is kept."
  )
  assert multiprocessing.active_children() == []


def test_processes_end_when_this_one_is_killed(vocabulary):
  program = f"""
from palm_mtf.data import worker_pool
from palm_mtf.data.tokens.encoder import Document, Encoder
from palm_mtf.data.vocabulary.load import open_vocabulary
worker_pool._BATCHES_BEFORE_PROCESSES = 0
def many():
  for _ in range(10_000):
    yield "train", Document("words and words\\n" * 1000)
with Encoder(open_vocabulary({vocabulary.path!r}), 2) as processes:
  for _ in processes.encode(many()):
    print("encoded", flush=True)
"""
  process = processes.start("-c", program)
  assert process.stdout.readline() == "encoded\n"
  process.kill()
  # Each of its processes has stdout open, so the end of stdout means that no
  # process is left.
  process.communicate(timeout=20)


def test_a_short_corpus_starts_no_process(vocabulary, code):
  with Encoder(vocabulary, 2) as encoder:
    list(encoder.encode((TRAIN, Document(text)) for text in code))
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
  "document", [Document(""), Document("", "words " * 200), Document("a", "b")]
)
def test_memory_stays_small_for_any_number_of_short_documents(
  vocabulary, document, monkeypatch
):
  monkeypatch.setattr(f"{MODULE}._BATCH_CHARACTERS", 1 << 16)

  def encode(count):
    with Encoder(vocabulary, 0) as encoder:
      encoded = encoder.encode((TRAIN, document) for _ in range(count))
      assert sum(1 for _ in encoded) == count

  # A batch has up to 256 documents; 3,500 more documents take over 2.3 MB.
  # Other threads of the process, which are measured too, take up to 0.4 MB.
  peaks = [peak_memory(lambda n=n: encode(n)) for n in (500, 4000)]
  assert peaks[1] < peaks[0] + 1_000_000


def test_a_long_document_comes_back_from_its_parts_without_added_spaces(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(f"{MODULE}._PART_CHARACTERS", _PART)
  vocabulary = train_prefixed("one two three", tmp_path)
  text = "one two\nthree one two three\ntwo\n" * 3
  with Encoder(vocabulary, 0) as encoder:
    (found,) = encoder.encode([(TRAIN, Document(text, text))])
  assert vocabulary.decode(found.text) == text
  assert vocabulary.decode(found.inputs) == text
