# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Pieces of a stream join to the text, and each token has its place in it."""

import time

import numpy as np
import pytest

from palm_mtf.config.decode import DecodeConfig
from palm_mtf.data.vocabulary.training import train_vocabulary
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.inference.slot_decoder import Chosen
from palm_mtf.serving.batcher import Row
from palm_mtf.serving.choice import Choice, text_offsets, token_text
from palm_mtf.serving.completion_request import read_completion_request

TEXT = "one \u00e9 two\u2581 \U0001f600\n three"


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
  path = str(tmp_path_factory.mktemp("vocabulary") / "vocabulary.model")
  train_vocabulary(["one two three four\n" * 20], 290, path=path)
  return Vocabulary(path)


def begin(vocabulary, prompt="one", **body):
  asked = read_completion_request(
    {"prompt": prompt, **body}, DecodeConfig(), sample_tokens=99, seed=0
  )
  row = Row(
    prompt=[0, *vocabulary.encode(prompt)],
    max_tokens=99,
    key=np.zeros([2], np.int32),
    temperature=0.0,
    top_k=None,
    top_p=1.0,
    wants_log_probs=True,
    scores_prompt=False,
    is_watched=False,
    deadline=time.monotonic() + 60,
    changed=lambda: None,
  )
  row.prompt_scores = scored(row.prompt[1:]) if asked.echo else []
  return row, Choice(0, row, asked, vocabulary)


def scored(ids):
  return [Chosen(i, -0.5 * i, {i: -0.5 * i, 2: -9.0}) for i in ids]


def pieces(vocabulary, ended, **body):
  """Returns what is read after each token of TEXT, and at the end."""
  row, choice = begin(vocabulary, **body)
  found = []
  for each in scored([*vocabulary.encode(TEXT), vocabulary.eod_id]):
    row.chosen.append(each)
    found.append(choice.read())
  row.ended = ended
  found.append(choice.read())
  return [piece for piece in found if piece]


@pytest.mark.parametrize("echo", [False, True])
def test_pieces_join_to_the_text_in_whole_characters(vocabulary, echo):
  found = pieces(vocabulary, "eod", echo=echo)
  assert len(found) > 5
  assert "".join(x["text"] for x in found) == ("one" if echo else "") + TEXT
  assert not any("\ufffd" in x["text"] for x in found)
  reasons = [x["finish_reason"] for x in found]
  assert set(reasons[:-1]) <= {None, "stop"} and reasons[-1] == "stop"


def test_log_p_of_each_token_is_told_once_with_its_place(vocabulary):
  found = pieces(vocabulary, "eod", echo=True, logprobs=1)
  told = [x["logprobs"] for x in found]
  ids = vocabulary.encode("one") + vocabulary.encode(TEXT)
  assert [p for x in told for p in x["token_logprobs"]] == [
    -0.5 * i for i in ids
  ]
  whole = "one" + TEXT
  offsets = [place for x in told for place in x["text_offset"]]
  tokens = [token for x in told for token in x["tokens"]]
  assert len(offsets) == len(tokens) == len(ids)
  for token, place in zip(tokens, offsets, strict=True):
    if token.startswith("bytes:"):
      byte = bytes.fromhex(token[-2:])
      assert byte in whole[place].encode()
    else:
      assert whole[place:].startswith(token)
  for x in told:
    for token, top in zip(x["tokens"], x["top_logprobs"], strict=True):
      assert token in top


def test_tokens_behind_a_stop_string_are_not_told(vocabulary):
  row, choice = begin(vocabulary, stop="two", logprobs=0)
  row.chosen.extend(scored(vocabulary.encode("one three two four")))
  assert choice.is_over()
  found = choice.read()
  assert (found["text"], found["finish_reason"]) == ("one three ", "stop")
  assert "".join(found["logprobs"]["tokens"]).startswith("one three")
  assert max(found["logprobs"]["text_offset"]) < len("one three ")
  assert found["logprobs"]["top_logprobs"] is None


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


@pytest.mark.parametrize("text", ["", "a", TEXT, "\U0001f600\u00e9", "\u2581"])
def test_offsets_are_those_of_decoding_each_beginning(vocabulary, text):
  ids = vocabulary.encode(text)
  expected = [
    len(vocabulary.decode(ids[:i]).rstrip("\ufffd")) for i in range(len(ids))
  ]
  assert text_offsets(vocabulary, ids) == expected


def test_a_byte_is_written_as_openai_writes_it(vocabulary):
  first, second = vocabulary.encode("\u00e9")
  assert token_text(vocabulary, first) == "bytes:\\xc3"
  assert token_text(vocabulary, second) == "bytes:\\xa9"
