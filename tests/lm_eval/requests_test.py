# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests mean here what they mean in the harness."""

import pytest

from palm_mtf.config import DecodeConfig
from palm_mtf.errors import UserError
from palm_mtf.lm_eval.requests import generation, split_pair

LENGTH = 512


def _asked(**gen_kwargs):
  return generation(gen_kwargs, DecodeConfig(), LENGTH)


@pytest.mark.parametrize(
  "pair, expected",
  [
    (("Q: a", " b"), ("Q: a", " b")),
    (("Q: ", "b"), ("Q:", " b")),
    (("Q:\n ", "b"), ("Q:", "\n b")),
    (("", "b"), ("", "b")),
  ],
)
def test_spaces_that_end_a_context_belong_to_the_continuation(pair, expected):
  assert split_pair(*pair) == expected


def test_a_task_that_says_nothing_has_256_greedy_tokens():
  asked = _asked()
  assert (asked.max_tokens, asked.decode.is_greedy) == (256, True)
  assert asked.decode.stop_strings == ()


@pytest.mark.parametrize("until, stops", [("x", ("x",)), (["", "a"], ("a",))])
def test_until_is_a_string_or_several(until, stops):
  assert _asked(until=until).decode.stop_strings == stops


@pytest.mark.parametrize(
  "gen_kwargs, temperature",
  [
    ({"do_sample": False, "temperature": 0.8}, 0.0),
    ({"temperature": 0.8}, 0.8),
    ({"do_sample": True}, 1.0),
    ({"temperature": 0.0, "num_beams": 1}, 0.0),
  ],
)
def test_a_temperature_counts_where_tokens_are_drawn(gen_kwargs, temperature):
  assert _asked(**gen_kwargs).decode.temperature == temperature


def test_the_number_of_tokens_has_four_names_of_which_the_first_counts():
  assert _asked(max_new_tokens=5).max_tokens == 5
  assert _asked(max_completion_tokens=6, max_gen_toks=7).max_tokens == 7


def test_as_many_tokens_as_a_row_has_become_half_a_row():
  assert _asked(max_gen_toks=LENGTH - 1).max_tokens == LENGTH - 1
  asked = _asked(max_gen_toks=LENGTH)
  assert (asked.max_tokens, asked.asked_tokens) == (LENGTH // 2, LENGTH)


def test_a_keyword_that_would_be_forgotten_is_refused():
  with pytest.raises(UserError, match="have num_beams; palm_mtf knows"):
    _asked(num_beams=4)
