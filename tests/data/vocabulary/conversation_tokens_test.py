# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Control tokens between texts change the texts as in tokenizers and llama.cpp.

The ids without control tokens in messages are those that the library
`tokenizers` gives to a text with the names of the tokens.
"""

import json
import random

import pytest
import tokenizers

from palm_mtf.data.vocabulary.chat import make_encoder
from palm_mtf.data.vocabulary.load import open_vocabulary
from tests import prefixed_vocabulary, tokenizer_files
from tests.tokenizer_files import END, START, SYSTEM, USER

FLAGS = ("", "lstrip", "rstrip", "single_word", "normalized")
WORDS = ["", " ", "a", " the", "\n", "\u2581", "caf\u00e9 ", "\U0001f600", USER]


def make_byte_level(folder):
  return tokenizer_files.make_byte_level("gpt-neox"), [END, START, SYSTEM]


def make_prepend(folder):
  content, _ = tokenizer_files.make_llama2(folder)
  return content, ["<s>", "</s>"]


def make_metaspace(scheme):
  def make(folder):
    content, names = make_prepend(folder)
    content["normalizer"] = None
    content["pre_tokenizer"] = {
      "type": "Metaspace",
      "replacement": "\u2581",
      "prepend_scheme": scheme,
      "split": False,
    }
    return content, names

  return make


MAKERS = {
  "byte level": make_byte_level,
  "Prepend": make_prepend,
  **{f"Metaspace {x}": make_metaspace(x) for x in ("always", "first", "never")},
}


def open_form(form, flag, folder):
  """Returns a vocabulary, {name: id} of its control tokens, and its file."""
  content, names = MAKERS[form](folder)
  for token in content["added_tokens"]:
    token |= {flag: True} if flag else {}
  path = tokenizer_files.write(folder, content, eos_token=names[-1])
  vocabulary = open_vocabulary(path)
  ids = filter(vocabulary.is_control, range(vocabulary.size))
  controls = {vocabulary.piece(i): i for i in ids}
  return vocabulary, controls, names, tokenizers.Tokenizer.from_file(path)


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("form", MAKERS)
def test_ids_are_those_of_the_whole_text(form, flag, tmp_path):
  vocabulary, controls, names, peer = open_form(form, flag, tmp_path)
  encode, rng = make_encoder(vocabulary, controls), random.Random(0)
  for _ in range(50):
    texts = ["".join(rng.choices(WORDS, k=3)) for _ in range(4)]
    parts = [x for text in texts for x in (controls[rng.choice(names)], text)]
    parts = parts[rng.randrange(2) :]
    text = "".join(
      x if isinstance(x, str) else vocabulary.piece(x) for x in parts
    )
    expected = peer.encode(text, add_special_tokens=False).ids
    assert encode(parts) == expected, parts


@pytest.mark.parametrize("form", MAKERS)
def test_a_name_in_a_text_is_text(form, tmp_path):
  vocabulary, controls, names, _ = open_form(form, "", tmp_path)
  text = f"a{names[0]} {names[-1]}{names[0]}"
  end = controls[names[-1]]
  ids = make_encoder(vocabulary, controls)([text, end, text])
  assert [i for i in ids if vocabulary.is_control(i)] == [end]
  assert vocabulary.decode(ids).replace(" ", "") == (2 * text).replace(" ", "")


def test_a_control_token_may_be_missing_in_added_tokens(tmp_path):
  content, _ = make_byte_level(tmp_path)
  kept = [x for x in content["added_tokens"] if x["content"] != END]
  path = tokenizer_files.write(
    tmp_path, {**content, "added_tokens": kept}, eos_token=END
  )
  vocabulary = open_vocabulary(path)
  peer = tokenizers.Tokenizer.from_str(json.dumps(content))
  encode = make_encoder(vocabulary, {END: vocabulary.eod_id})
  expected = peer.encode(f"a the{END} a", add_special_tokens=False).ids
  assert encode(["a the", vocabulary.eod_id, " a"]) == expected


def test_sentencepiece_puts_a_space_after_each_control_token(tmp_path):
  """As llama.cpp does for a GGUF file with add_space_prefix."""
  vocabulary = prefixed_vocabulary.train_prefixed("a red bird", tmp_path)
  eod = vocabulary.eod_id
  ids = make_encoder(vocabulary, {"</s>": eod})(["a red", eod, "bird", eod])
  names = [vocabulary.piece(i) for i in ids]
  assert "".join(names) == "\u2581a\u2581red</s>\u2581bird</s>"
