# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Inputs and targets of texts are T5's, new each epoch, and lose nothing."""

import collections
import dataclasses
import types

import numpy as np
import pytest

from palm_mtf.config.data import SpanCorruption
from palm_mtf.data.batches.mixed_rows import MixedRows, RowSource
from palm_mtf.data.batches.objectives import (
  CAUSAL,
  PrefixLM,
  SpanCorruptionLM,
  from_json,
  to_json,
)
from palm_mtf.data.batches.packing import WholeRows
from tests.data.small_sources import EOD, ListSource, corpus_of, token_array

SENTINEL = 1999  # <extra_id_0>
DENSITY, MEAN = 0.15, 3.0
SPANS = SpanCorruptionLM(DENSITY, MEAN, SENTINEL, EOD)
TEXTS = [
  list(range(100 * i, 100 * i + n)) for i, n in enumerate([9, 40, 1, 25])
]


def rows_of(objective, *, length=24, packed=True, texts=TEXTS, seed=0):
  tokens = token_array([([], text) for text in texts], has_inputs=False)
  return WholeRows(
    tokens, length, objective=objective, packed=packed, seed=seed
  )


def documents(rows, epoch=0):
  """Yields inputs and targets of each document, read from the features."""
  for number in range(rows.num_rows):
    row = rows.read(number, epoch)
    for segment in range(1, row["segments"].max() + 1):
      inside = row["segments"] == segment
      learned = row["loss_weights"][inside] > 0
      given = row["prefix"][inside] > 0
      # The prefix is all before the first target: the 0 and the inputs.
      assert given.sum() == 1 + (~learned).sum() and given[: given.sum()].all()
      assert row["inputs"][inside][0] == 0
      targets = row["targets"][inside]
      np.testing.assert_array_equal(row["inputs"][inside][1:], targets[:-1])
      yield targets[~learned].tolist(), targets[learned].tolist()


def restored(inputs, targets):
  """Returns the original text of a corrupted example."""
  assert targets[-1] == EOD
  spans, text = collections.defaultdict(list), []
  for token in targets[:-1]:
    if token > SENTINEL - 100:
      last = token
    else:
      spans[last].append(token)
  for token in inputs:
    text += spans.pop(token) if token > SENTINEL - 100 else [token]
  assert not spans
  return text


@pytest.mark.parametrize("packed", [False, True])
def test_a_prefix_and_its_rest_are_the_text_and_the_next_epoch_cuts_elsewhere(
  packed,
):
  rows = rows_of(PrefixLM(), packed=packed)
  found = [list(documents(rows, epoch)) for epoch in (0, 0, 1)]
  assert found[0] == found[1] != found[2]
  for epoch in found:
    whole = sorted(x + y for x, y in epoch)
    pieces = [
      text[i : i + 24]
      for text in ([*text, EOD] for text in TEXTS)
      for i in range(0, len(text), 24)
    ]
    assert whole == sorted(pieces)
    assert all(inputs and targets for inputs, targets in epoch)


def test_a_text_of_one_token_has_no_inputs():
  rows = rows_of(PrefixLM(), texts=[[]] * 3)
  assert list(documents(rows)) == [([], [EOD])] * 3


def test_every_place_for_the_cut_is_as_likely():
  tokens = np.arange(6, dtype=np.int32)
  cuts = collections.Counter(
    PrefixLM().example(tokens, f"key {i}").num_inputs for i in range(5000)
  )
  assert sorted(cuts) == [1, 2, 3, 4, 5]
  # Each count is binomial: 1000, with a standard deviation of 28.
  assert all(abs(n - 1000) < 140 for n in cuts.values())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [4, 5, 24, 100])
def test_the_spans_and_the_rest_are_the_text_and_the_next_epoch_takes_others(
  length, packed
):
  rows = rows_of(SPANS, length=length, packed=packed)
  found = [list(documents(rows, epoch)) for epoch in (0, 0, 1)]
  assert found[0] == found[1]
  # A single span is always the last, as in T5, so nothing is random.
  assert length < 100 or found[0] != found[2]
  for epoch in found:
    tokens = [token for each in epoch for token in restored(*each)]
    assert sorted(tokens) == sorted(x for text in TEXTS for x in text)


def test_rows_of_corrupted_text_are_as_full_as_they_can_be():
  """Longer pieces do not fit: 100 is 90 of text, 4 or 5 spans and [eod]."""
  rows = rows_of(SPANS, length=100, packed=False, texts=[list(range(900))])
  used = [
    (rows.read(i)["segments"] > 0).sum() for i in range(rows.num_rows - 1)
  ]
  assert min(used) >= 98


def test_a_span_s_sentinel_is_the_one_in_its_place():
  inputs, targets = next(
    documents(rows_of(SPANS, length=100, texts=TEXTS[1:2]))
  )
  sentinels = [x for x in inputs if x > 1900]
  assert sentinels == [x for x in targets if x > 1900]
  assert sentinels == [SENTINEL - i for i in range(len(sentinels))]


@pytest.fixture(scope="module")
def t5():
  pytest.importorskip("t5", reason="t5 is not installed")
  import t5.data.preprocessors

  import palm_mtf._tf  # noqa: F401 (makes Mesh TensorFlow importable)

  return t5.data.preprocessors


@pytest.mark.parametrize(
  ("density", "mean"), [(0.15, 3.0), (0.5, 3.0), (0.15, 8.0), (0.1, 2.0)]
)
def test_as_many_tokens_and_spans_are_taken_out_as_t5_takes(t5, density, mean):
  from palm_mtf._tf import tf

  with tf.Graph().as_default(), tf.Session() as session:
    length = tf.placeholder(tf.int32, [])
    mask = t5.random_spans_noise_mask(
      length, density, seeds=[(1, 2), (3, 4)], mean_noise_span_length=mean
    )
    counts = SpanCorruption(density, mean)
    for n in [*range(2, 60), 114, 512, 1000]:
      noise = session.run(mask, {length: n})
      starts = noise & ~np.concatenate([[False], noise[:-1]])
      assert counts.num_noise_tokens(n) == noise.sum(), n
      assert counts.num_spans(n) == starts.sum(), n


def test_inputs_and_targets_of_the_same_noise_are_t5_s(t5):
  from palm_mtf._tf import tf

  vocabulary = types.SimpleNamespace(vocab_size=SENTINEL + 1)
  with tf.Graph().as_default(), tf.Session() as session:
    for n in (2, 9, 57, 200):
      tokens = np.arange(3, 3 + n, dtype=np.int32)
      made, num_inputs = SPANS.example(tokens, f"key {n}")
      noise = np.isin(tokens, made[num_inputs:])
      assert noise[-1] and not noise[0]  # as in T5
      expected = session.run(
        [
          replace(tf.constant(tokens), tf.constant(noise), vocabulary, None)
          for replace in (
            t5.noise_span_to_unique_sentinel,
            t5.nonnoise_span_to_unique_sentinel,
          )
        ]
      )
      np.testing.assert_array_equal(made[:num_inputs], expected[0])
      np.testing.assert_array_equal(made[num_inputs:], [*expected[1], EOD])


def test_all_sizes_of_spans_are_equally_likely():
  """3 spans split 5 noise and 5 kept tokens in 6 ways each: 36 masks."""
  objective = SpanCorruptionLM(0.5, 5 / 3, SENTINEL, EOD)
  tokens = np.arange(10, dtype=np.int32)
  seen = collections.Counter(
    tuple(objective.example(tokens, f"key {i}").tokens) for i in range(1440)
  )
  assert len(seen) == 36
  # 40 each, with a standard deviation of 6.3.
  assert max(seen.values()) < 40 + 5 * 6.3


@pytest.mark.parametrize("objective", [PrefixLM(), SPANS], ids=str)
def test_examples_keep_their_own_inputs(objective):
  tokens = token_array([([5] * 3, [6] * 4)] * 9, has_inputs=True)
  rows = WholeRows(tokens, 16, objective=objective, packed=True, seed=0)
  plain = WholeRows(tokens, 16, packed=True, seed=0)
  assert rows.num_rows == plain.num_rows
  for number in range(rows.num_rows):
    row = rows.read(number)
    for name, values in plain.read(number).items():
      np.testing.assert_array_equal(row[name], values)
  assert all(inputs and targets for inputs, targets in documents(rows))


def test_a_stream_of_rows_draws_anew_in_each_epoch():
  rows = rows_of(PrefixLM(), texts=[list(range(3, 23))], packed=False)
  stream = MixedRows([RowSource("mine", 1.0, rows)], seed=0)
  assert stream.features[-1] == "prefix"
  cuts = {int(x["prefix"].sum()) for x in stream.read(np.arange(40))}
  assert len(cuts) > 10


def test_tokens_are_others_with_another_objective(vocabulary, tmp_path):
  corpus = corpus_of(
    [ListSource(["a text"] * 30)], vocabulary, tmp_path, packing="packed"
  )
  changed = {
    dataclasses.replace(corpus, objective=x).fingerprint
    for x in (CAUSAL, PrefixLM(), SPANS, dataclasses.replace(SPANS, eod_id=9))
  }
  assert len(changed) == 4 and corpus.fingerprint in changed


@pytest.mark.parametrize("objective", [CAUSAL, PrefixLM(), SPANS], ids=str)
def test_an_objective_goes_to_another_host_as_json(objective):
  assert from_json(to_json(objective)) == objective
