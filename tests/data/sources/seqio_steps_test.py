# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import functools

import numpy as np
import pytest

seqio = pytest.importorskip("seqio", reason="SeqIO is not installed")
tf = pytest.importorskip("tensorflow")

from palm_mtf.data.sources.seqio_task import split_at_tokenize  # noqa: E402
from palm_mtf.errors import UserError  # noqa: E402
from tests.seqio_testing import (  # noqa: E402
  REKEY,
  TEXTS,
  add_examples,
  add_lines,
  open_one,
)

pytestmark = pytest.mark.usefixtures("registries")


kinds = seqio.preprocessors
PARTIAL = functools.partial(
  functools.partial(kinds.tokenize, with_eos=True), copy_pretokenized=False
)


@functools.wraps(kinds.tokenize)
def wrapped(*args, **kwargs):
  return kinds.tokenize(*args, **kwargs)


@pytest.mark.parametrize(
  "steps",
  [
    [REKEY],
    [REKEY, kinds.tokenize],
    [REKEY, kinds.tokenize_and_append_eos],
    [REKEY, PARTIAL, kinds.append_eos],
    [REKEY, wrapped],
    [seqio.CacheDatasetPlaceholder(required=True), REKEY, kinds.tokenize],
  ],
  ids=["none", "bare", "and_eos", "partial", "wrapped", "cached"],
)
def test_tokenize_is_found_in_whatever_it_is_wrapped(lines, steps):
  kept, _ = split_at_tokenize(add_lines("wrapped", lines, steps))
  assert kept[1:] == [REKEY]


@pytest.fixture
def t5_vocabulary(vocabulary):
  return seqio.SentencePieceVocabulary(vocabulary.path)


def split_tokens(dataset, sequence_length):
  """Like T5's, cuts pieces of the targets' length, so there is no text."""
  return (
    dataset.map(lambda example: {"targets": example["targets"]})
    .unbatch()
    .batch(sequence_length["targets"])
  )


def test_ids_of_later_steps_are_taken_as_they_are(
  lines, t5_vocabulary, vocabulary
):
  steps = [
    REKEY,
    seqio.preprocessors.tokenize,
    split_tokens,
    seqio.preprocessors.append_eos,
  ]
  lines.write_text("\n".join(TEXTS[:40]))
  add_lines("ids", lines, steps, vocabulary=t5_vocabulary)
  source = open_one("ids", sequence_length=16)
  documents = [d for _, d in source.documents()]
  assert all(d.text.dtype == np.int32 for d in documents)
  assert all(d.text.shape == (16,) for d in documents[:-1])
  ids = [i for text in TEXTS[:40] for i in t5_vocabulary.encode(text)]
  read = sorted(d.text.tolist() for d in documents)
  assert read == sorted(ids[i : i + 16] for i in range(0, len(ids), 16))
  source.check_vocabulary(vocabulary.sha256)
  for other in (None, "another"):
    with pytest.raises(UserError) as info:
      source.check_vocabulary(other)
    assert str(info.value) == (
      "TASK: the preprocessors of ids make token ids, so the run's vocabulary "
      f"must be the task's, which is {vocabulary.path}; set VOCABULARY = "
      f"{vocabulary.path!r}, or give a task that makes text."
    )


def test_ids_of_inputs_and_targets_share_the_row(lines, t5_vocabulary):
  lengths = []

  def note(dataset, sequence_length):
    lengths.append(sequence_length)
    return dataset.map(lambda e: {**e, "inputs": e["targets"][:1]})

  add_lines(
    "pairs",
    lines,
    [REKEY, seqio.preprocessors.tokenize, note],
    features=("inputs", "targets"),
    vocabulary=t5_vocabulary,
  )
  source = open_one("pairs", sequence_length=100)
  assert source.has_inputs
  assert lengths[0] == {"inputs": 50, "targets": 50}
  _, document = next(source.documents())
  assert document.inputs.shape == (1,)


def test_ids_of_a_vocabulary_without_a_file_cannot_be_checked():
  ids = [[3, 4, 1], [5, 6, 7]]
  vocabulary = seqio.PassThroughVocabulary(10, eos_id=1)
  add_examples("made", {"train": {"targets": ids}}, [], vocabulary=vocabulary)
  source = open_one("made")
  documents = [d.text.tolist() for _, d in source.documents()]
  assert sorted(documents) == [[3, 4], [5, 6, 7]]
  with pytest.raises(UserError, match="which is a PassThroughVocabulary"):
    source.check_vocabulary("any")
