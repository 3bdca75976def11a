# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import tracemalloc

import pytest

from palm_mtf.config import DataConfig
from palm_mtf.data.documents import Corpus
from palm_mtf.errors import UserError


def corpus_of(folder, share=0.5):
  return Corpus(
    DataConfig(
      text_files=f"{folder}/**/*", vocabulary=None, validation_share=share
    )
  )


def held_out(corpus) -> set[str]:
  return {d.text for d in corpus if corpus.is_validation(d)}


def test_documents_are_the_files_byte_for_byte(tmp_path):
  texts = ["a\r\n\tb\r", "\ufeffmark", "\u00e9\u05d0\U0001f600\n\n"]
  for i, text in enumerate(texts):
    (tmp_path / f"{i}").write_bytes(text.encode())
  documents = list(corpus_of(tmp_path))
  assert [d.text for d in documents] == texts
  assert [d.num_bytes for d in documents] == [len(t.encode()) for t in texts]


def test_files_that_are_not_text_are_left_out_counted_and_named(
  tmp_path, capsys
):
  (tmp_path / "a").write_bytes(b"caf\xe9")
  (tmp_path / "b").write_bytes(b"nul\0")
  (tmp_path / "c").write_bytes(b"text")
  (tmp_path / "d").write_bytes(b"")
  corpus = corpus_of(tmp_path)
  assert [d.text for d in corpus] == ["text"]
  corpus.report_skipped()
  assert capsys.readouterr() == (
    "",
    "palm_mtf: 2 of 4 files left out (not UTF-8, or with NUL bytes, such as "
    f"{tmp_path}/a).\n",
  )


def test_nothing_is_said_when_every_file_is_text(tmp_path, capsys):
  (tmp_path / "a").write_text("text")
  corpus = corpus_of(tmp_path)
  assert len(list(corpus)) == 1
  corpus.report_skipped()
  assert capsys.readouterr().err == ""


def test_a_corpus_without_any_text_is_an_error(tmp_path):
  (tmp_path / "a").write_bytes(b"\xff\xfe")
  with pytest.raises(
    UserError, match=r"none of 1 files is text .*such as .*/a"
  ):
    list(corpus_of(tmp_path))


def test_a_file_that_vanishes_is_named(tmp_path):
  (tmp_path / "a").write_text("text")
  corpus = corpus_of(tmp_path)
  (tmp_path / "a").unlink()
  with pytest.raises(UserError, match="/a: No such file or directory"):
    list(corpus)


def test_the_split_depends_on_texts_and_not_on_names_or_order(tmp_path):
  texts = [f"document {i}" for i in range(50)]
  for folder, order in (("one", texts), ("two", texts[::-1])):
    (tmp_path / folder).mkdir()
    for i, text in enumerate(order):
      (tmp_path / folder / f"{i:02d}").write_text(text)
  one, two = (held_out(corpus_of(tmp_path / name)) for name in ("one", "two"))
  assert one == two
  assert 0 < len(one) < 50


def test_equal_texts_are_on_the_same_side(tmp_path):
  for i in range(60):
    (tmp_path / f"{i}").write_text(f"document {i % 20}")
  corpus = corpus_of(tmp_path)
  training = {d.text for d in corpus if not corpus.is_validation(d)}
  assert training
  assert held_out(corpus)
  assert not training & held_out(corpus)


def test_a_larger_share_only_adds_documents(tmp_path):
  for i in range(400):
    (tmp_path / f"{i}").write_text(f"document {i}")
  shares = (0.05, 0.2, 0.5)
  splits = [held_out(corpus_of(tmp_path, share)) for share in shares]
  assert splits[0] < splits[1] < splits[2]
  for share, split in zip(shares, splits, strict=True):
    # Four standard deviations of a binomial draw.
    deviation = 4 * (400 * share * (1 - share)) ** 0.5
    assert abs(len(split) - 400 * share) < deviation


def test_one_document_is_in_memory_at_a_time(tmp_path):
  for i in range(20):
    (tmp_path / f"{i}").write_bytes(b"x" * 1_000_000)
  corpus = corpus_of(tmp_path)
  tracemalloc.start()
  num_bytes = sum(document.num_bytes for document in corpus)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert num_bytes == 20_000_000
  assert peak < 6_000_000
