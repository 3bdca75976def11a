# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import os

import numpy as np
import pytest

from palm_mtf.config import DataConfig
from palm_mtf.data.documents import Corpus
from palm_mtf.data.token_store import (
  DamagedStoreError,
  read_store,
  write_store,
)
from palm_mtf.data.vocabulary_training import cut_text


@pytest.fixture
def corpus(folder):
  return Corpus(
    DataConfig(
      text_files=f"{folder}/*.txt", vocabulary=None, validation_share=0.2
    )
  )


@pytest.fixture
def path(corpus, vocabulary, tmp_path):
  path = str(tmp_path / "tokens" / "store")
  write_store(path, corpus, vocabulary)
  return path


def split_at_eod(tokens) -> list[list[int]]:
  ends = np.flatnonzero(tokens == 1) + 1
  return [part.tolist() for part in np.split(tokens, ends)[:-1]]


def test_a_split_is_its_documents_in_order_each_with_eod(
  path, corpus, vocabulary
):
  store = read_store(path)
  for split, is_validation in ((store.train, False), (store.validation, True)):
    texts = [d.text for d in corpus if corpus.is_validation(d) == is_validation]
    documents = split_at_eod(split.tokens)
    assert [vocabulary.decode(ids) for ids in documents] == texts
    assert split.tokens[-1] == vocabulary.eod_id
    assert split.tokens.dtype == np.dtype("<u2")
    assert split.num_tokens == sum(map(len, documents)) == len(split.tokens)
    assert split.num_documents == len(texts) > 0
    assert split.num_bytes == sum(len(text.encode()) for text in texts)
    assert split.longest_document_tokens == max(map(len, documents))
    assert split.bytes_per_token == split.num_bytes / split.num_tokens


def test_documents_are_encoded_as_a_whole_or_in_whole_lines(
  path, corpus, vocabulary
):
  expected = []
  for document in corpus:
    if not corpus.is_validation(document):
      for part in cut_text(document.text, 1 << 16):
        expected += vocabulary.encode(part)
      expected.append(vocabulary.eod_id)
  assert read_store(path).train.tokens.tolist() == expected
  assert max(len(document.text) for document in corpus) > 1 << 16


def test_the_same_corpus_gives_the_same_fingerprint(
  path, corpus, vocabulary, tmp_path
):
  write_store(str(tmp_path / "other"), corpus, vocabulary)
  first, other = read_store(path), read_store(str(tmp_path / "other"))
  assert first.fingerprint == other.fingerprint
  assert sorted(os.listdir(path)) == [
    "manifest.json",
    "train.bin",
    "validation.bin",
  ]


def test_tokens_are_mapped_and_cannot_be_written(path):
  tokens = read_store(path).train.tokens
  assert isinstance(tokens, np.memmap)
  with pytest.raises(ValueError, match="read-only"):
    tokens[0] = 1


def test_large_vocabularies_take_four_bytes_a_token(
  corpus, vocabulary, tmp_path, monkeypatch
):
  monkeypatch.setattr(vocabulary, "size", 65537)
  write_store(str(tmp_path / "wide"), corpus, vocabulary)
  monkeypatch.setattr(vocabulary, "size", 65536)
  write_store(str(tmp_path / "narrow"), corpus, vocabulary)
  wide = read_store(str(tmp_path / "wide")).train.tokens
  narrow = read_store(str(tmp_path / "narrow")).train.tokens
  assert (wide.itemsize, narrow.itemsize) == (4, 2)
  assert np.array_equal(wide, narrow)


def cut_short(path):
  os.truncate(path, os.path.getsize(path) - 1)


def change_one_bit(path):
  with open(path, "r+b") as file:
    file.seek(os.path.getsize(path) // 2)
    byte = file.read(1)[0]
    file.seek(-1, os.SEEK_CUR)
    file.write(bytes([byte ^ 1]))


def empty(path):
  os.truncate(path, 0)


@pytest.mark.parametrize(
  "damage", [cut_short, change_one_bit, empty, os.remove]
)
@pytest.mark.parametrize("name", ["train.bin", "validation.bin"])
def test_every_damage_to_the_tokens_is_found(path, damage, name):
  damage(os.path.join(path, name))
  with pytest.raises(DamagedStoreError, match=name):
    read_store(path)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"dtype": "<u2"', "null"])
def test_a_damaged_manifest_is_found(path, content):
  manifest = os.path.join(path, "manifest.json")
  with open(manifest, "w") as file:
    file.write(content)
  with pytest.raises(DamagedStoreError, match=r"manifest\.json is no manifest"):
    read_store(path)


class _Interrupted(Corpus):
  def __iter__(self):
    for number, document in enumerate(super().__iter__()):
      if number == 5:
        raise KeyboardInterrupt
      yield document


def test_an_interrupt_leaves_nothing_behind(corpus, vocabulary, tmp_path):
  with pytest.raises(KeyboardInterrupt):
    write_store(
      str(tmp_path / "tokens" / "store"), _Interrupted(corpus.data), vocabulary
    )
  assert os.listdir(tmp_path / "tokens") == []


def test_a_store_that_another_process_made_meanwhile_stays(
  path, corpus, vocabulary
):
  before = os.stat(os.path.join(path, "train.bin")).st_ino
  write_store(path, corpus, vocabulary)
  assert os.stat(os.path.join(path, "train.bin")).st_ino == before
  assert os.listdir(os.path.dirname(path)) == ["store"]
