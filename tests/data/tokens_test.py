# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import resource

import pytest

from palm_mtf.config import DataConfig
from palm_mtf.data.tokens import load_tokens
from palm_mtf.errors import UserError


@pytest.fixture
def load(folder, vocabulary, tmp_path):
  """Loads the tokens of `folder` for a run in tmp_path / "run"."""

  def load(share=0.2, sequence_length=128, batch_size=2):
    data = DataConfig(
      text_files=f"{folder}/*.txt", vocabulary=None, validation_share=share
    )
    return load_tokens(
      str(tmp_path / "run"),
      data,
      vocabulary=vocabulary,
      sequence_length=sequence_length,
      batch_size=batch_size,
    )

  return load


def stores(tmp_path) -> list[pathlib.Path]:
  return sorted((tmp_path / "run" / "tokens").iterdir())


def error(load, **settings) -> str:
  with pytest.raises(UserError) as info:
    load(**settings)
  assert "\n" not in str(info.value)
  return str(info.value)


def test_tokens_are_encoded_once(load, tmp_path, capsys):
  first = load()
  message = capsys.readouterr().err
  assert message.startswith(
    f"palm_mtf: encoded {first.train.num_documents} training documents "
    f"({first.train.num_tokens:,} tokens) and "
  )
  (store,) = stores(tmp_path)
  assert str(store) in message
  inode = (store / "train.bin").stat().st_ino
  assert load().fingerprint == first.fingerprint
  assert capsys.readouterr() == ("", "")
  assert (store / "train.bin").stat().st_ino == inode


def test_a_later_start_reads_no_text(load, folder):
  first = load()
  for path in folder.iterdir():
    stat = path.stat()
    path.write_bytes(b"x" * stat.st_size)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
  assert load().fingerprint == first.fingerprint


def test_a_changed_a_new_and_a_missing_file_lead_to_new_tokens(load, folder):
  fingerprints = [load().fingerprint]
  (folder / "000.txt").write_text("changed\n" * 100)
  fingerprints.append(load().fingerprint)
  (folder / "new.txt").write_text("new\n" * 100)
  fingerprints.append(load().fingerprint)
  (folder / "001.txt").unlink()
  fingerprints.append(load().fingerprint)
  assert len(set(fingerprints)) == 4


def test_a_file_that_only_gets_a_new_time_gives_the_same_tokens(
  load, folder, tmp_path
):
  first = load()
  os.utime(folder / "000.txt", ns=(0, 0))
  assert load().fingerprint == first.fingerprint
  assert len(stores(tmp_path)) == 2


def test_another_share_or_vocabulary_has_a_store_of_its_own(
  load, vocabulary, tmp_path, monkeypatch
):
  load(share=0.2)
  load(share=0.3)
  monkeypatch.setattr(vocabulary, "sha256", "another")
  load(share=0.2)
  assert len(stores(tmp_path)) == 3


def test_a_damaged_store_is_rebuilt_and_said(load, tmp_path, capsys):
  first = load()
  (store,) = stores(tmp_path)
  os.truncate(store / "train.bin", 1000)
  capsys.readouterr()
  assert load().fingerprint == first.fingerprint
  said = capsys.readouterr().err.splitlines()
  assert said[0] == (
    f"palm_mtf: damaged tokens are encoded anew: {store}/train.bin has 1,000 "
    f"bytes, not {2 * first.train.num_tokens:,}"
  )
  assert stores(tmp_path) == [store]


def test_a_full_disk_is_named_with_what_is_needed_and_nothing_is_left(
  load, folder, tmp_path
):
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
  try:
    message = error(load)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  files = list(folder.iterdir())
  needed = 2 * (sum(path.stat().st_size for path in files) + len(files))
  assert message.startswith(f"no disk space left for {tmp_path}/run/tokens/")
  assert f"which needs up to {needed:,} bytes; free some" in message
  assert stores(tmp_path) == []
  assert load().train.num_tokens


def test_a_model_dir_that_is_a_file_is_an_error(load, tmp_path):
  (tmp_path / "run").write_text("")
  message = error(load)
  assert message.startswith(f"cannot write {tmp_path}/run/tokens/")
  assert message.endswith("; choose another MODEL_DIR.")


def test_files_that_are_no_text_are_told_when_they_are_encoded(
  load, folder, capsys
):
  (folder / "binary.txt").write_bytes(b"\0\1")
  load()
  assert (
    f"files left out (not UTF-8, or with NUL bytes, such as {folder}/bin"
    in (capsys.readouterr().err)
  )


def test_a_sequence_longer_than_any_document_is_told(load, capsys):
  longest = load(share=0.5).train.longest_document_tokens
  assert "SEQUENCE_LENGTH" not in capsys.readouterr().err
  load(share=0.5, sequence_length=longest, batch_size=1)
  assert capsys.readouterr().err == ""
  load(share=0.5, sequence_length=longest + 1, batch_size=1)
  assert capsys.readouterr().err == (
    f"palm_mtf: SEQUENCE_LENGTH = {longest + 1:,} is longer than the longest "
    f"training document ({longest:,} tokens with [eod]): documents are joined, "
    f"so training works, but no token learns from more than {longest - 1:,} "
    "tokens of its own document.\n"
  )


def test_nothing_held_out_is_an_error_with_a_share_that_works(load):
  message = error(load, share=0.001)
  assert message.startswith("VALIDATION_SHARE = 0.001: holds out none of 2")
  share = float(message.split("set VALIDATION_SHARE = ")[1].split()[0])
  assert load(
    share=share, sequence_length=8, batch_size=1
  ).validation.num_tokens


def test_a_lone_document_asks_for_more_files(load, folder):
  for path in list(folder.iterdir())[1:]:
    path.unlink()
  assert error(load, share=1e-4).endswith(
    "holds out none of 1 documents (one file is one document); give more files."
  )


def test_too_little_validation_text_is_an_error_with_the_numbers(load):
  store = load()
  size = store.validation.num_tokens
  message = error(load, sequence_length=size // 4 + 1, batch_size=4)
  assert message == (
    f"validation text = {size:,} tokens in {store.validation.num_documents} "
    "documents: less than one batch, GLOBAL_BATCH_SIZE * SEQUENCE_LENGTH = 4 * "
    f"{size // 4 + 1:,} = {4 * (size // 4 + 1):,} tokens; give more text, "
    "raise VALIDATION_SHARE, or lower GLOBAL_BATCH_SIZE or SEQUENCE_LENGTH."
  )
  load(sequence_length=size // 4, batch_size=4)


def test_too_little_training_text_is_an_error(load):
  message = error(load, batch_size=10**6)
  assert message.startswith("training text = ")
  assert "lower VALIDATION_SHARE" in message
