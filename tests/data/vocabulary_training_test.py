# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import os
import random
import re
import resource

import pytest

from palm_mtf.data.vocabulary import Vocabulary
from palm_mtf.data.vocabulary_training import (
  cut_text,
  sample_text,
  train_vocabulary,
)
from palm_mtf.errors import UserError


def train(documents, vocab_size, path) -> bytes:
  train_vocabulary(documents, vocab_size, path=str(path))
  return path.read_bytes()


def test_the_same_documents_give_the_same_model_in_any_order(code, tmp_path):
  first = train(code, 700, tmp_path / "a")
  assert train(code, 700, tmp_path / "b") == first
  assert train(code[::-1], 700, tmp_path / "c") == first
  assert train(code[:-1], 700, tmp_path / "d") != first


def test_the_vocabulary_has_the_size_asked_for(code, tmp_path):
  train(code, 700, tmp_path / "a")
  assert Vocabulary(str(tmp_path / "a")).size == 700


def test_training_says_nothing_on_the_terminal(code, tmp_path, capfd):
  train(code, 700, tmp_path / "a")
  with pytest.raises(UserError):
    train(["a few words"], 5000, tmp_path / "b")
  assert capfd.readouterr() == ("", "")


def test_too_many_pieces_for_the_text_is_an_error_with_the_number_that_works(
  tmp_path,
):
  words = ["a few words, and a few more words after these words\n"] * 3
  with pytest.raises(UserError) as info:
    train(words, 5000, tmp_path / "a")
  message = str(info.value)
  assert message.startswith("VOCAB_SIZE = 5000: too high, the training text ")
  supported = int(re.search(r"at most (\d+) ", message)[1])
  assert f"set VOCAB_SIZE = {supported} or less" in message
  assert not (tmp_path / "a").exists()
  assert train(words, supported, tmp_path / "a")


def test_too_few_pieces_for_the_characters_is_an_error_with_the_number(
  tmp_path,
):
  with pytest.raises(UserError) as info:
    train(["abcdef " * 9], 260, tmp_path / "a")
  assert str(info.value) == (
    "VOCAB_SIZE = 260: too low, the control and byte pieces and the text's "
    "frequent characters alone are 266; set VOCAB_SIZE = 266 or more."
  )


@pytest.mark.parametrize("documents", [[], [""], ["\u2581\u2585"]])
def test_no_training_text_is_an_error(tmp_path, documents):
  with pytest.raises(UserError, match="no training document"):
    train(documents, 300, tmp_path / "a")


def test_reserved_characters_cost_no_more_than_themselves(code, tmp_path):
  plain = train(code, 700, tmp_path / "a")
  marked = [text.replace("\n\n", "\n\u2585\n", 1) for text in code]
  train(marked, 700, tmp_path / "b")
  sizes = [
    len(Vocabulary(str(tmp_path / name)).encode(code[0])) for name in "ab"
  ]
  assert sizes[0] == pytest.approx(sizes[1], rel=0.02)
  assert plain


def test_a_full_disk_is_named_and_nothing_is_left(code, tmp_path):
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
  try:
    with pytest.raises(UserError) as info:
      train(code, 700, tmp_path / "a")
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert f"no disk space left for {tmp_path}, which needs" in str(info.value)
  assert os.listdir(tmp_path) == []


def test_a_sample_is_the_same_in_any_order_and_fits(code):
  shuffled = random.Random(0).sample(code, len(code))
  for limit in (5_000, 50_000, 200_000):
    sample = sample_text(code, limit)
    assert sample == sample_text(shuffled, limit)
    assert limit - 4096 <= sum(map(len, sample)) <= limit


def test_a_sample_of_all_is_all(code):
  sample = sample_text(code, 10**9)
  assert sorted(sample) == sorted(
    chunk for text in code for chunk in cut_text(text, 4096)
  )


def test_a_sample_is_spread_over_the_documents(code):
  total = sum(map(len, code))
  sample = set(sample_text(code, total // 2))
  longest = sorted(code, key=len)[-10:]
  for text in longest:
    chunks = list(cut_text(text, 4096))
    assert 0 < sum(chunk in sample for chunk in chunks) < len(chunks)


@pytest.mark.parametrize("text", ["", "abc", "a\nbc\n\n\ndefghi\njk", "\n" * 9])
def test_parts_are_short_and_make_the_text_again(text):
  parts = list(cut_text(text, 4))
  assert "".join(parts) == text
  assert all(0 < len(part) <= 4 for part in parts)


def test_parts_end_with_a_line_where_a_line_fits():
  assert list(cut_text("ab\ncdefgh\nij", 4)) == ["ab\n", "cdef", "gh\n", "ij"]
