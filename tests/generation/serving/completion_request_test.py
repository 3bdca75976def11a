# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Request bodies have the meaning of OpenAI's API, or are refused."""

import pytest

from palm_mtf.config import DecodeConfig
from palm_mtf.generation.serving.completion_request import (
  read_completion_request,
)
from tests.refusals import message_of

DECODE = DecodeConfig(temperature=0.3, top_k=9, top_p=0.8, stop_strings=["x"])


def read(**body):
  return read_completion_request(body, DECODE, sample_tokens=12, seed=4)


def test_missing_fields_have_the_settings_of_the_run():
  found = read(prompt="a", model="m", user="u", logprobs=None, best_of=1)
  assert found.prompts == ["a"]
  assert (found.temperature, found.top_k, found.top_p) == (0.3, 9, 0.8)
  assert (found.stop, found.max_tokens, found.seed) == (["x"], 12, 4)
  assert (found.n, found.logprobs) == (1, None)
  assert not (found.echo or found.stream or found.include_usage)


@pytest.mark.parametrize(
  "neutral",
  [
    {"reasoning_effort": "none"},
    {"reasoning_effort": "medium"},
    {"verbosity": "medium"},
    {"chat_template_kwargs": {}},
    {"stream_options": {"include_obfuscation": False}},
  ],
)
def test_a_neutral_value_of_a_field_changes_nothing(neutral):
  assert vars(read(prompt="a", **neutral)) == vars(read(prompt="a"))


def test_four_long_stop_strings_are_read_and_the_runs_are_unbounded():
  stops = ["a" * 1000] * 4
  assert read(prompt="a", stop=stops).stop == stops
  many = DecodeConfig(stop_strings=["b" * 2000] * 9)
  found = read_completion_request(
    {"prompt": "a"}, many, sample_tokens=1, seed=0
  )
  assert found.stop == ["b" * 2000] * 9


@pytest.mark.parametrize(
  ("prompt", "expected"),
  [
    ("a", ["a"]),
    ("", [""]),
    (["a", "b"], ["a", "b"]),
    ([5, 6], [[5, 6]]),
    ([[5], [6]], [[5], [6]]),
  ],
)
def test_prompts_are_texts_or_ids_single_or_several(prompt, expected):
  assert read(prompt=prompt).prompts == expected


def test_all_fields_of_a_body_are_read():
  found = read(
    prompt=["a", "b"],
    n=2,
    stop="end",
    stream=True,
    stream_options={"include_usage": True},
    echo=True,
    max_tokens=0,
    logprobs=5,
    temperature=0,
    top_p=1,
    top_k=1,
    seed=0,
  )
  assert found.num_rows == 4
  assert found.stop == ["end"]
  assert found.include_usage and found.stream and found.echo
  assert (found.max_tokens, found.logprobs, found.seed) == (0, 5, 0)


@pytest.mark.parametrize(
  ("body", "message"),
  [
    ({}, "prompt is missing"),
    ({"prompt": []}, "prompt: give a text"),
    ({"prompt": ["a", 5]}, "prompt: give a text"),
    ({"prompt": [True]}, "prompt: give a text"),
    ({"prompt": "a", "tempel": 1}, "unknown field 'tempel'"),
    ({"prompt": "a", "max_token": 1}, 'did you mean "max_tokens"'),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens = 0: give at least 1"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens = 1.5: give a whole"),
    ({"prompt": "a", "temperature": "0"}, "temperature = '0': give a number"),
    ({"prompt": "a", "temperature": float("nan")}, "temperature = nan"),
    ({"prompt": "a", "top_p": 0}, "top_p = 0: give a number above 0"),
    ({"prompt": "a", "top_k": 0}, "top_k = 0: give a whole number"),
    ({"prompt": "a", "n": 0}, "n = 0: give a whole number"),
    (
      {"prompt": "a", "logprobs": 6},
      "logprobs = 6: give a whole number of at most 5.",
    ),
    ({"prompt": "a", "logprobs": True}, "logprobs = True: give a whole"),
    ({"prompt": "a", "stop": [""]}, "stop = ['']: give a text"),
    ({"prompt": "a", "stop": ["b"] * 5}, "stop: 5 texts; give at most 4."),
    ({"prompt": "a", "stop": "b" * 1001}, "give at most 1,000."),
    ({"prompt": "a", "stop": "\ud83d"}, "stop = '\\ud83d': has half of a"),
    ({"prompt": "a", "stop": ["b", "c\udc00"]}, "has half of a surrogate pair"),
    ({"prompt": "a", "n": 2**63}, "n = 9,223,372,036,854,775,808: give a"),
    ({"prompt": "a", "stream": 1}, "stream = 1: give true or false"),
    ({"prompt": "a", "stream_options": {"a": 1}}, "stream_options = "),
    (
      {"prompt": "a", "stream_options": {"include_obfuscation": True}},
      "stream_options = ",
    ),
    ({"prompt": "a", "verbosity": "low"}, "verbosity = 'low': is not"),
    (
      {"prompt": "a", "chat_template_kwargs": {"a": 1}},
      "chat_template_kwargs = ",
    ),
    ({"prompt": "a", "suffix": "b"}, "suffix = 'b': is not supported"),
    ({"prompt": "a", "best_of": 3}, "best_of = 3: is not supported"),
    ({"prompt": "a", "tools": [1]}, "tools = [1]: is not supported"),
    (
      {"prompt": "a", "tool_choice": "f"},
      "tool_choice = 'f': is not supported",
    ),
    (
      {"prompt": "a", "response_format": {"type": "json"}},
      "response_format = ",
    ),
    ({"prompt": "a", "stop_token_ids": [1]}, "stop_token_ids = [1]: is not"),
    ({"prompt": "a", "service_tier": "flex"}, "service_tier = 'flex': is not"),
    ({"prompt": "a", "store": True}, "store = True: is not supported"),
    ({"prompt": "a", "min_p": 0.1}, "min_p = 0.1: is not supported"),
    (
      {"prompt": "a", "ignore_eos": True},
      "ignore_eos = True: is not supported",
    ),
    ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias = "),
    ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty = 0.5"),
  ],
)
def test_what_cannot_work_is_one_error_line(body, message):
  assert message in message_of(read, **body)
