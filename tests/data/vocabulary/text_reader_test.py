# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Text that is decoded in parts equals text that is decoded at once."""

import hypothesis
import pytest
from hypothesis import strategies as st

from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.text_reader import TextReader, decode_after
from tests.data.small_sources import repeatable
from tests.data.vocabulary.byte_pair_test import FORMS, make_form

OPEN = "\ufffd"
PLAIN = {
  "normalization_rule_name": "identity",
  "remove_extra_whitespaces": False,
}
SETTINGS = {
  # SentencePiece's defaults, as in T5, with byte pieces.
  "defaults": {},
  # Llama's and Mistral's kind.
  "prefix": {"model_type": "bpe", **PLAIN},
  "trimmed": {"add_dummy_prefix": False},
  "plain": {"add_dummy_prefix": False, **PLAIN},
  "symbols": {
    "user_defined_symbols": ["<|user|>", "\u2581<x>", "\n"],
    "control_symbols": ["<|control|>"],
    **PLAIN,
  },
  "suffix": {"treat_whitespace_as_suffix": True},
  "no bytes": {"byte_fallback": False, "vocab_size": 200},
}


@pytest.fixture(scope="module", params=[*SETTINGS, *FORMS])
def some(request, foreign, tmp_path_factory):
  """A SentencePiece model, or a tokenizer.json."""
  if request.param in SETTINGS:
    return open_vocabulary(foreign(**SETTINGS[request.param]))
  folder = tmp_path_factory.mktemp("tokenizer")
  return make_form(request.param, folder).vocabulary


def _ids(vocabulary):
  # Bytes, spaces and controls more often than drawn evenly.
  ids, few = range(vocabulary.size + 2), (b"", b"a", b"\xe2", b"\x9f", b"\xc3")
  often = [
    i
    for i in range(vocabulary.size)
    if vocabulary.token_bytes(i).strip() in few or vocabulary.is_control(i)
  ]
  text = st.text("\u00e9\U0001f600\u2581a e\u0301", max_size=4)
  return st.one_of(
    st.sampled_from(ids).map(lambda i: [i]),
    st.sampled_from(often).map(lambda i: [i]),
    st.lists(st.sampled_from(often), max_size=4),
    text.map(vocabulary.encode),
  )


@repeatable(25)
@hypothesis.given(st.data())
def test_tokens_read_one_by_one_join_to_the_text_of_all(some, data):
  """A stream has whole characters, and takes nothing back."""
  parts = data.draw(st.lists(_ids(some), max_size=6))
  ids = [i for part in parts for i in part]
  cut = data.draw(st.integers(0, len(ids)))
  reader = TextReader(some)
  whole = some.decode(ids)
  for number, i in enumerate(ids):
    place = reader.add(i)
    assert whole.startswith(reader.text)
    assert reader.whole_text == some.decode(ids[: number + 1])
    assert (
      some.decode(ids[: number + 1])
      .rstrip(OPEN)
      .startswith(whole[:place].rstrip(OPEN))
    )
  before = TextReader(some)
  for i in ids[:cut]:
    before.add(i)
  assert before.text + decode_after(some, ids[:cut], ids[cut:]) == whole


def test_the_place_of_a_byte_is_that_of_its_character(some):
  ids = some.encode("a\u00e9\U0001f600")
  if some.is_byte[ids].sum() < 6:
    return  # it has no bytes, or a piece for a character
  reader = TextReader(some, [some.eod_id])
  places = [reader.add(i) for i in ids]
  begin = places.index(1)
  assert places[begin:][:6] == [1, 1, 2, 2, 2, 2]
  assert reader.text.rstrip() == "a\u00e9\U0001f600"


def test_a_byte_is_written_as_openai_writes_it(vocabulary):
  reader = TextReader(vocabulary)
  tokens = [reader.token_text(i) for i in vocabulary.encode("\u00e9")]
  assert tokens == ["bytes:\\xc3", "bytes:\\xa9"]


def test_a_byte_that_is_a_character_is_written_as_the_character(vocabulary):
  (caret,) = (
    i for i in range(vocabulary.size) if vocabulary.piece(i) == "<0x5E>"
  )
  assert TextReader(vocabulary).token_text(caret) == "^"
