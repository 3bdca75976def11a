# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import functools
import os
import pathlib
import shutil
import signal
import threading
import time

import pytest

from palm_mtf.config import DataConfig
from palm_mtf.data.sources import files
from palm_mtf.data.sources.text_files import open_sources
from palm_mtf.data.tokens import cache as cache_module
from palm_mtf.data.tokens.cache import cache_stores, load_stores
from palm_mtf.errors import UserError
from tests import processes
from tests.log_lines import without_stamps


@pytest.fixture
def run(folder, vocabulary, tmp_path):
  """Loads, or caches, the tokens of a folder for the run tmp_path / "run"."""

  def run(share=0.2, cached=None, texts=folder, *, command=load_stores):
    data = DataConfig(
      text_files=f"{texts}/*.txt",
      vocabulary=None,
      validation_share=share,
      cache_dir=cached and str(cached),
    )
    (found,) = command(
      str(tmp_path / "run"), data, open_sources(data), vocabulary
    )
    return found

  return run


@pytest.fixture
def cache(run, tmp_path):
  """A CACHE_DIR with the tokens of the folder."""
  cache = tmp_path / "cache"
  run(cached=cache, command=cache_stores)
  return cache


def stores(folder: pathlib.Path) -> list[pathlib.Path]:
  return sorted(each for each in folder.glob("*") if each.is_dir())


def test_tokens_are_encoded_once_and_that_is_said(
  run, folder, tmp_path, capsys
):
  (folder / "binary.txt").write_bytes(b"\0\1")
  first = run()
  (store,) = stores(tmp_path / "run" / "tokens")
  train, validation = first.train.counts, first.validation.counts
  left_out, encoded = without_stamps(capsys.readouterr().err).splitlines()
  assert f"NUL bytes, such as {folder}/binary.txt" in left_out
  assert encoded == (
    f"palm_mtf: encoded {train.num_documents} training documents "
    f"({train.num_tokens:,} tokens) and {validation.num_documents} validation "
    f"documents ({validation.num_tokens:,} tokens) into {store}"
  )
  inode = (store / "train-00000.npy").stat().st_ino
  assert run().fingerprint == first.fingerprint
  assert capsys.readouterr() == ("", "")
  assert (store / "train-00000.npy").stat().st_ino == inode


def test_tokens_of_cache_dir_are_read_and_others_kept_by_the_run_and_it_is_said(
  run, cache, tmp_path, capsys
):
  capsys.readouterr()
  before, own = stores(cache), tmp_path / "run" / "tokens"
  run(cached=cache)
  assert not own.exists()
  run(0.3, cache)
  first, second, third = without_stamps(capsys.readouterr().err).splitlines()
  assert first == f"palm_mtf: tokens of text_files are read from {cache}"
  assert second == (
    f"palm_mtf: warning: CACHE_DIR = {str(cache)!r} lacks the tokens of "
    f"text_files: they are kept in {own}; palm_mtf data cache keeps them for "
    "all runs"
  )
  assert third.startswith("palm_mtf: encoded ")
  assert (stores(cache), len(stores(own))) == (before, 1)
  run(0.3, cache)  # are found there
  assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_cache_dir_that_may_not_be_written_works(run, cache, monkeypatch):
  # Patched, because permissions do not stop the superuser.
  content = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
  access = os.access
  monkeypatch.setattr(
    os, "access", lambda path, mode: mode != os.W_OK and access(path, mode)
  )
  folders = [cache, *stores(cache)]
  for path in folders:
    path.chmod(0o555)
  try:
    run(cached=cache)
    assert run(0.3, cache).train.counts.num_tokens
  finally:
    for path in folders:
      path.chmod(0o755)
  assert {p: p.stat().st_mtime_ns for p in cache.rglob("*")} == content


def test_moved_and_touched_files_are_found_again_and_changed_ones_are_not(
  run, cache, folder, tmp_path, capsys
):
  moved = tmp_path / "elsewhere"
  shutil.move(folder, moved)
  for path in moved.iterdir():
    path.touch()
  capsys.readouterr()
  first = run(cached=cache, texts=moved).fingerprint
  assert "are read from" in capsys.readouterr().err
  path = moved / "003.txt"
  stat = path.stat()
  path.write_bytes(b"#" + path.read_bytes()[1:])
  os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as it was
  assert run(cached=cache, texts=moved).fingerprint != first
  assert "lacks the tokens" in capsys.readouterr().err


def test_another_share_or_vocabulary_has_tokens_of_its_own_and_that_is_said(
  run, vocabulary, tmp_path, monkeypatch, capsys
):
  run(0.2)
  (first,) = stores(tmp_path / "run" / "tokens")
  assert "also" not in capsys.readouterr().err
  run(0.3)
  assert (
    f"{first.parent} also has tokens of other text or settings: {first.name}; "
    "remove the folders that no run needs"
  ) in capsys.readouterr().err
  monkeypatch.setattr(vocabulary, "sha256", "another")
  run(0.2)
  assert len(stores(tmp_path / "run" / "tokens")) == 3


def test_a_later_start_does_not_read_the_text(run, monkeypatch):
  monkeypatch.setattr(files, "_SETTLED_NS", -(10**12))  # as if old
  first = run()
  monkeypatch.setattr(files, "hash_file", None)
  assert run().fingerprint == first.fingerprint


def test_text_that_changes_while_it_is_encoded_gets_no_tokens_of_its_old_name(
  run, folder, tmp_path, monkeypatch
):
  real = cache_module.write_store

  def write(path, source, vocabulary):
    (folder / "003.txt").write_text("changed, since it was hashed")
    real(path, source, vocabulary)

  monkeypatch.setattr(cache_module, "write_store", write)
  with pytest.raises(
    UserError, match=r"003\.txt: was changed while it was read"
  ):
    run()
  assert [x.suffix for x in stores(tmp_path / "run" / "tokens")] == [".partial"]


def test_damaged_tokens_are_mended_and_that_is_said(run, tmp_path, capsys):
  first = run()
  (store,) = stores(tmp_path / "run" / "tokens")
  os.truncate(store / "train-00000.npy", 1000)
  capsys.readouterr()
  assert run().fingerprint == first.fingerprint
  said = without_stamps(capsys.readouterr().err).splitlines()
  assert said[0] == (
    f"palm_mtf: warning: damaged tokens are encoded again: {store}/"
    "train-00000.npy: its content is not what was written"
  )
  assert said[1].startswith("palm_mtf: encoded ")
  assert stores(tmp_path / "run" / "tokens") == [store]


def test_damage_in_cache_dir_is_not_mended_by_a_run(
  run, cache, tmp_path, capsys
):
  first = run(cached=cache)
  (store,) = stores(cache)
  os.truncate(store / "train-00000.npy", 1000)
  capsys.readouterr()
  assert run(cached=cache).fingerprint == first.fingerprint
  said = capsys.readouterr().err
  assert f"{store}/train-00000.npy: its content" in said
  assert "lacks the tokens" in said
  assert (store / "train-00000.npy").stat().st_size == 1000
  run(cached=cache, command=cache_stores)
  assert run(cached=cache).fingerprint == first.fingerprint


def flip_a_bit(path):
  content = bytearray(path.read_bytes())
  content[-1] ^= 1
  path.write_bytes(content)


def test_a_changed_bit_is_found_where_every_byte_is_compared(
  run, cache, tmp_path, capsys
):
  first = run(cached=cache)
  (store,) = stores(cache)
  flip_a_bit(store / "train-00000.npy")
  capsys.readouterr()
  run(cached=cache, command=cache_stores)
  assert capsys.readouterr().err == ""
  verify = functools.partial(cache_stores, verify=True)
  _, mended = run(cached=cache, command=verify)
  assert f"{store}/train-00000.npy: its content" in capsys.readouterr().err
  assert mended.fingerprint == first.fingerprint


def test_a_run_reads_no_byte_of_a_large_store(run, tmp_path, monkeypatch):
  run()

  def read(path):
    raise AssertionError(f"{path} was read")

  monkeypatch.setattr("palm_mtf.data.tokens.shard.hash_file", read)
  run()


def test_data_cache_says_where_the_tokens_are(run, cache, tmp_path):
  path, store = run(cached=cache, command=cache_stores)
  assert [path] == [str(each) for each in stores(cache)]
  own, again = run(command=cache_stores)
  assert os.path.dirname(own) == str(tmp_path / "run" / "tokens")
  assert again.fingerprint == store.fingerprint


PROGRAM = """
import sys
from palm_mtf.config import DataConfig
from palm_mtf.console import configure_logging
from palm_mtf.data.sources.text_files import open_sources
from palm_mtf.data.tokens.cache import load_stores
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
configure_logging()
data = DataConfig(text_files={texts!r}, vocabulary=None, validation_share=0.2)
sources = open_sources(data)
print("ready", flush=True)
sys.stdin.readline()
(store,) = load_stores({model_dir!r}, data, sources, Vocabulary({vocabulary!r}))
print(store.fingerprint)
"""


def test_of_two_processes_at_once_one_waits_and_both_get_the_tokens(
  run, folder, vocabulary, tmp_path
):
  program = PROGRAM.format(
    texts=f"{folder}/*.txt",
    model_dir=str(tmp_path / "both"),
    vocabulary=vocabulary.path,
  )
  encoders = [processes.start("-c", program, stdin=-1) for _ in range(2)]
  for process in encoders:
    assert process.stdout.readline() == "ready\n"
  for process in encoders:
    process.stdin.write("\n")
    process.stdin.flush()
  ends = [process.communicate(timeout=60) for process in encoders]
  expected = run().fingerprint
  assert [out for out, _ in ends] == [f"{expected}\n"] * 2
  said = "".join(err for _, err in ends)
  assert said.count("encoded ") == 1
  assert len(stores(tmp_path / "both" / "tokens")) == 1


def test_a_process_waits_for_another_that_encodes_until_it_is_killed(
  run, tmp_path, capsys
):
  tokens = tmp_path / "run" / "tokens"
  holder = processes.start(
    "-c",
    "import time\n"
    "from palm_mtf.data.tokens.cache import _lock_folder\n"
    f"with _lock_folder({str(tokens)!r}):\n"
    "  print('held', flush=True)\n"
    "  time.sleep(600)\n",
  )
  assert holder.stdout.readline() == "held\n"
  started = time.monotonic()
  threading.Timer(1, holder.kill).start()
  run()
  assert time.monotonic() - started > 0.5
  assert holder.wait() == -signal.SIGKILL
  assert without_stamps(capsys.readouterr().err).startswith(
    f"palm_mtf: waiting for another process that encodes into {tokens}\n"
  )


def test_a_model_dir_that_is_a_file_is_an_error(run, tmp_path):
  (tmp_path / "run").write_text("")
  with pytest.raises(UserError, match=r"cannot write .*/run/tokens.*choose an"):
    run()
