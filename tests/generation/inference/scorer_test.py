# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Likelihoods equal the oracle's, and depend only on the text."""

import numpy as np
import pytest

from palm_mtf.generation.inference.scorer import (
  Example,
  Scorer,
  choose_row_length,
  count_rows_at_once,
  find_windows,
)
from palm_mtf.generation.inference.sessions import LoadedDecoder
from tests import oracle
from tests.decode_testing import save_checkpoint
from tests.mtf_testing import SINGLE, mesh_layout, small_config

LENGTH, STRIDE = 48, 20
CONFIG = small_config(sequence_length=LENGTH)
PARAMS = oracle.random_parameters(CONFIG, seed=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  return save_checkpoint(CONFIG, PARAMS, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def scorer(checkpoint):
  with LoadedDecoder(checkpoint, CONFIG, SINGLE) as loaded:
    yield Scorer(loaded, STRIDE)


def ids(count, seed=0):
  return np.random.default_rng(seed).integers(1, 44, count).tolist()


EXAMPLES = [
  Example(ids(30, 1), ids(5, 2)),
  Example([], ids(48, 3)),
  Example(ids(2, 4), ids(1, 5)),
  Example([], ids(1, 6)),
  Example(ids(31, 7), ids(17, 8)),
]


def scores(scorer, examples):
  found = dict(scorer.log_likelihoods(examples))
  return [found[i] for i in range(len(examples))]


def test_targets_given_inputs_have_the_oracles_likelihood(scorer):
  expected = [oracle.log_likelihood(CONFIG, PARAMS, *x) for x in EXAMPLES]
  np.testing.assert_allclose(scores(scorer, EXAMPLES), expected, rtol=1e-5)


def test_inputs_attend_to_one_another_if_the_objective_has_such_inputs(
  checkpoint,
):
  config = small_config(sequence_length=LENGTH, objective="prefix_lm")
  long = ids(LENGTH + STRIDE, 12)
  # Scored tokens are given in later windows.
  windows = ([], long[:LENGTH]), (long[STRIDE:LENGTH], long[LENGTH:])
  expected = [
    *(oracle.log_likelihood(config, PARAMS, *x) for x in EXAMPLES),
    sum(oracle.log_likelihood(config, PARAMS, *x) for x in windows),
  ]
  causal = oracle.log_likelihood(CONFIG, PARAMS, *EXAMPLES[0])
  assert abs(causal - expected[0]) > 1e-3 * abs(causal)
  with LoadedDecoder(checkpoint, config, SINGLE) as loaded:
    found = scores(Scorer(loaded, STRIDE), [*EXAMPLES, Example([], long)])
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_document_begins_after_the_start_token_and_a_later_row_after_0(
  scorer,
):
  ids_of_long = ids(LENGTH + STRIDE, 10)
  behind_7 = Scorer(scorer._loaded, STRIDE, start_id=7)
  expected = [
    *(oracle.log_likelihood(CONFIG, PARAMS, *x, start=7) for x in EXAMPLES),
    oracle.log_likelihood(CONFIG, PARAMS, [], ids_of_long[:LENGTH], start=7)
    + oracle.log_likelihood(
      CONFIG, PARAMS, ids_of_long[STRIDE:LENGTH], ids_of_long[LENGTH:]
    ),
  ]
  examples = [*EXAMPLES, Example([], ids_of_long)]
  np.testing.assert_allclose(scores(behind_7, examples), expected, rtol=1e-5)


def test_without_a_start_token_inputs_begin_with_their_first_token(scorer):
  bare = Scorer(scorer._loaded, STRIDE, start_id=7, first=7, adds_start=False)
  long = ids(LENGTH + STRIDE, 10)
  expected = [
    oracle.log_likelihood(CONFIG, PARAMS, given[1:], targets, start=given[0])
    if given
    else oracle.log_likelihood(CONFIG, PARAMS, [], targets, start=7)
    for given, targets in EXAMPLES
  ]
  given = long[STRIDE:LENGTH]
  expected.append(
    oracle.log_likelihood(CONFIG, PARAMS, [], long[:LENGTH], start=7)
    + oracle.log_likelihood(CONFIG, PARAMS, given, long[LENGTH:], start=7)
  )
  examples = [*EXAMPLES, Example([], long)]
  np.testing.assert_allclose(scores(bare, examples), expected, rtol=1e-5)


def test_a_score_has_the_same_bits_whatever_else_is_scored(scorer):
  many = EXAMPLES + [Example(ids(9, i), ids(7, i)) for i in range(70)]
  together = scores(scorer, many)
  for place in (0, 1, 2, 3, 4, 37, 74):
    assert scores(scorer, [many[place]]) == [together[place]]


def test_inputs_that_are_too_long_lose_their_beginning(scorer):
  given, targets = ids(100, 10), ids(8, 11)
  (found,) = scores(scorer, [Example(given, targets)])
  assert found == scores(scorer, [Example(given[8 - LENGTH :], targets)])[0]
  assert found != scores(scorer, [Example(given[-30:], targets)])[0]


def test_targets_are_greedy_if_the_oracle_finds_nothing_likelier(
  scorer, checkpoint
):
  given = ids(6, 12)
  likeliest = []
  for _ in range(3):
    tokens = np.array([[0, *given, *likeliest]])
    likeliest.append(oracle.forward(CONFIG, PARAMS, tokens)[0, -1].argmax())
  other = (likeliest[1] + 1) % CONFIG.vocab_size
  examples = [
    Example(given, likeliest),
    Example(given, [likeliest[0], other, likeliest[2]]),
    Example(given, [*likeliest[:2], other]),
  ]
  expected = scores(scorer, examples)
  mesh = mesh_layout("padded vocab over three")
  with LoadedDecoder(checkpoint, CONFIG, mesh) as split:
    for loaded in (scorer._loaded, split):
      found = dict(Scorer(loaded, STRIDE).scores(examples))
      assert [found[i].is_greedy for i in range(3)] == [True, False, False]
      np.testing.assert_allclose(
        [found[i].log_likelihood for i in range(3)], expected, rtol=1e-5
      )


@pytest.mark.parametrize(("length", "stride"), [(1, 1), (4, 1), (7, 3), (7, 7)])
def test_each_token_of_a_document_is_scored_once_with_enough_before_it(
  length, stride
):
  for num_tokens in range(1, 30):
    found = find_windows(num_tokens, 0, length, stride)
    scored = [place for w in found for place in range(w.first, w.stop)]
    assert scored == list(range(num_tokens))
    for w in found:
      assert 0 <= w.start <= w.first < w.stop <= w.start + length
      for place in range(w.first, w.stop):
        assert place - w.start >= min(place, length - stride)


@pytest.mark.parametrize(
  ("num_tokens", "first", "expected"),
  [
    (8, 5, [(0, 5, 8)]),
    (11, 5, [(3, 5, 11)]),  # the inputs lose their beginning
    (13, 5, [(5, 5, 13)]),
    (14, 5, [(5, 5, 13), (6, 13, 14)]),  # scored as a text without inputs
  ],
)
def test_targets_stay_together_and_keep_the_end_of_their_inputs(
  num_tokens, first, expected
):
  assert find_windows(num_tokens, first, 8, 4) == expected


def test_rows_have_few_lengths_and_are_less_than_twice_as_long_as_needed():
  lengths = [choose_row_length(n, 300) for n in range(1, 301)]
  assert set(lengths) == {32, 64, 128, 256, 300}
  assert all(n <= length <= 300 for n, length in enumerate(lengths, 1))
  assert all(
    length < 2 * n for n, length in enumerate(lengths, 1) if length > 32
  )
  assert choose_row_length(3, 20) == 20


def test_longer_rows_are_fewer_at_once_and_divide_among_slices():
  counts = [count_rows_at_once(x, 1) for x in (32, 64, 2048, 4096)]
  assert counts == [64, 32, 1, 1]
  assert count_rows_at_once(2048, 3) == 3
  assert count_rows_at_once(32, 3) % 3 == 0
