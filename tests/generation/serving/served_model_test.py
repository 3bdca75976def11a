# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The pieces of a stream join to the text, and tokens have places in it."""

import dataclasses
import time

import numpy as np
import pytest

from palm_mtf.config import DecodeConfig
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.training import train_vocabulary
from palm_mtf.generation.inference.prompts import add_start
from palm_mtf.generation.inference.slot_decoder import Chosen
from palm_mtf.generation.serving.batcher import Row
from palm_mtf.generation.serving.completion_request import (
  read_completion_request,
)
from palm_mtf.generation.serving.served_model import Choice, ServedModel
from tests import tokenizer_files
from tests.generation.serving.live_server import small_config, small_vocabulary
from tests.prefixed_vocabulary import train_prefixed
from tests.refusals import message_of

TEXT = "one \u00e9 two\u2581 \U0001f600\n three"


@pytest.fixture(scope="module", params=["sentencepiece", "byte level"])
def vocabulary(request, tmp_path_factory):
  folder = tmp_path_factory.mktemp("vocabulary")
  texts = ["one two three four\n" * 20]
  if request.param == "byte level":
    content = tokenizer_files.make_byte_level("gpt-2", texts, 290)
    return open_vocabulary(tokenizer_files.write(folder, content))
  path = str(folder / "vocabulary.model")
  train_vocabulary(texts, 290, path=path)
  return open_vocabulary(path)


def begin(vocabulary, prompt="one", **body):
  asked = read_completion_request(
    {"prompt": prompt, **body}, DecodeConfig(), sample_tokens=99, seed=0
  )
  row = Row(
    prompt=[0, *vocabulary.encode(prompt)]
    if isinstance(prompt, str)
    else add_start(prompt, 0, vocabulary.eod_id),
    asked=asked,
    key=np.zeros([2], np.int32),
    deadline=time.monotonic() + 60,
    client="client",
    changed=lambda: None,
  )
  row.prompt_scores = scored(row.prompt[1:]) if asked.echo else []
  return row, Choice(0, row, vocabulary)


def scored(ids):
  return [Chosen(i, -0.5 * i, {i: -0.5 * i, 2: -9.0}) for i in ids]


def read_all(row, choice, ids, ended, *, streams=True):
  """Returns what `read` gives after each token, and at the end.

  If not `streams`, all tokens are there at the first `read`.
  """
  found = []
  if not streams:
    row.chosen.extend(scored(ids))
    ids = []
  for each in scored(ids):
    row.chosen.append(each)
    found.append(choice.read())
  row.ended = ended
  found.append(choice.read())
  return [piece for piece in found if piece]


def joined(found, name):
  """Returns a list of `logprobs`, joined over all pieces."""
  return [x for piece in found for x in piece["logprobs"][name]]


@pytest.mark.parametrize("echo", [False, True])
def test_pieces_join_to_the_text_in_whole_characters(vocabulary, echo):
  ids = [*vocabulary.encode(TEXT), vocabulary.eod_id]
  found = read_all(*begin(vocabulary, echo=echo), ids, "eod")
  assert len(found) > 5
  assert "".join(x["text"] for x in found) == ("one" if echo else "") + TEXT
  assert not any("\ufffd" in x["text"] for x in found)
  reasons = [x["finish_reason"] for x in found]
  assert set(reasons[:-1]) <= {None, "stop"} and reasons[-1] == "stop"


def test_log_p_of_each_token_is_returned_once_with_its_place(vocabulary):
  ids = [*vocabulary.encode(TEXT), vocabulary.eod_id]
  found = read_all(*begin(vocabulary, echo=True, logprobs=1), ids, "eod")
  ids = [*vocabulary.encode("one"), *ids]
  assert joined(found, "token_logprobs") == [-0.5 * i for i in ids]
  whole = "one" + TEXT
  offsets, tokens = joined(found, "text_offset"), joined(found, "tokens")
  tops = joined(found, "top_logprobs")
  assert len(offsets) == len(tokens) == len(tops) == len(ids)
  for token, place, top in zip(tokens, offsets, tops, strict=True):
    assert token in top
    if token.startswith("bytes:"):
      byte = bytes.fromhex(token[-2:])
      assert byte in whole[place].encode()
    else:
      assert whole[place:].startswith(token)


def test_tokens_join_to_a_text_with_bytes_that_are_characters(vocabulary):
  text = "one ^ ~two"
  ids = vocabulary.encode(text)
  assert any(vocabulary.token_bytes(i) == b"^" for i in ids)
  found = read_all(*begin(vocabulary, logprobs=1), ids, "length")
  assert "".join(piece["text"] for piece in found) == text
  assert "".join(joined(found, "tokens")) == text


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize(
  ("text", "streams"), [("", True), (" two", True), (" two", False)]
)
def test_the_eod_that_ends_a_text_has_an_entry_at_the_end_of_the_text(
  vocabulary, echo, text, streams
):
  row, choice = begin(vocabulary, echo=echo, logprobs=2)
  ids = [*vocabulary.encode(text), vocabulary.eod_id]
  found = read_all(row, choice, ids, "eod", streams=streams)
  whole = ("one" if echo else "") + text
  assert "".join(piece["text"] for piece in found) == whole
  assert found[-1]["finish_reason"] == "stop"
  for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
    entries = joined(found, name)
    assert len(entries) == echo * choice.num_prompt_tokens + choice.num_tokens
  assert choice.num_tokens == len(ids)
  assert joined(found, "token_logprobs")[-1] == -0.5 * vocabulary.eod_id
  assert joined(found, "text_offset")[-1] == len(whole)
  assert "".join(joined(found, "tokens")) == whole


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_entries_end_with_the_token_that_ends_a_stop_string(
  vocabulary, streams, at_once
):
  row, choice = begin(vocabulary, stop="two", logprobs=0, stream=streams)
  ids = vocabulary.encode("one three two four")
  found = read_all(row, choice, ids, "", streams=not at_once)
  found = [x for x in found if x["logprobs"]["tokens"]]
  assert choice.is_over()
  assert "".join(piece["text"] for piece in found) == "one three "
  assert found[-1]["finish_reason"] == "stop"
  tokens = joined(found, "tokens")
  assert "".join(tokens[:-1]) != "".join(tokens) == "one three two"
  assert len(tokens) == choice.num_tokens < len(ids)
  assert max(joined(found, "text_offset")) <= len("one three ")
  assert found[-1]["logprobs"]["top_logprobs"] is None


def test_without_a_start_token_the_first_token_has_no_log_p(vocabulary):
  row, _ = begin(vocabulary, echo=True, logprobs=1)
  row.prompt, row.num_start = row.prompt[1:], 0
  row.prompt_scores = scored(row.prompt[1:])
  choice = Choice(0, row, vocabulary)
  assert choice.num_prompt_tokens == len(row.prompt)
  row.ended = "length"
  told = choice.read()["logprobs"]
  assert "".join(told["tokens"]) == "one"
  assert told["token_logprobs"] == [None, *(-0.5 * i for i in row.prompt[1:])]


@pytest.fixture(scope="module", params=[False, True])
def prefixed(request, tmp_path_factory):
  return train_prefixed(
    "a red bird. a blue bird.",
    tmp_path_factory.mktemp("prefixed"),
    remove_extra_whitespaces=request.param,
  )


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_a_text_keeps_the_space_of_its_first_word(prefixed, echo, streams):
  *prompt, bird, end = prefixed.encode("a red bird.")
  row, choice = begin(prefixed, prompt="a red", echo=echo, logprobs=1)
  assert row.prompt[1:] == prompt
  found = read_all(row, choice, [bird, end], "length", streams=streams)
  text = "a red bird." if echo else " bird."
  assert "".join(piece["text"] for piece in found) == text
  assert joined(found, "tokens")[-2:] == [" bird", "."]
  assert "".join(joined(found, "tokens")) == text
  assert joined(found, "text_offset")[-2:] == [len(text) - 6, len(text) - 1]
  if echo:
    assert joined(found, "tokens")[0] == "a"


def test_a_stop_string_may_begin_with_the_space_of_the_first_word(prefixed):
  row, choice = begin(prefixed, prompt="a red", stop=" bird")
  row.chosen.extend(scored(prefixed.encode("a red bird.")[2:]))
  assert choice.is_over()
  assert choice.read()["text"] == "" and choice.num_tokens == 1


def test_a_row_without_a_new_token_has_no_piece(vocabulary):
  row, choice = begin(vocabulary)
  assert choice.read() is None and not choice.is_over()
  row.chosen.extend(scored(vocabulary.encode("two")))
  assert choice.read()["text"] == "two"
  assert choice.read() is None
  row.ended = "time"
  assert choice.read() == {
    "text": "",
    "index": 0,
    "logprobs": None,
    "finish_reason": "length",
  }


def test_a_text_has_no_room_at_virtual_positions():
  config = small_config()
  model = dataclasses.replace(config.model, adapter="prefix", adapter_length=4)
  config = dataclasses.replace(config, model=model)
  vocabulary = small_vocabulary()
  served = ServedModel(
    name="m", vocabulary=vocabulary, config=config, most_rows=4, most_secs=60
  )
  for prompt in ("one", "o" * 10**6):
    asked = served.read({"prompt": prompt, "max_tokens": 32})
    message = message_of(served.make_choices, asked, "client", lambda: None)
    assert "more than SEQUENCE_LENGTH - ADAPTER_LENGTH = 28" in message
