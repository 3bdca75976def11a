# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import errno
import functools
import os
import pathlib
import shutil
import signal
import threading
from concurrent import futures

import numpy as np
import pytest

from palm_mtf.config import DataConfig
from palm_mtf.data.sources import files
from palm_mtf.data.sources.document import TRAIN, VALIDATION, Document
from palm_mtf.data.sources.text_files import open_sources
from palm_mtf.data.tokens import store as store_module
from palm_mtf.data.tokens.shard import DamagedShardError
from palm_mtf.data.tokens.store import cache_stores, load_stores, read_store
from palm_mtf.data.vocabulary.sentencepiece_vocabulary import (
  SentencePieceVocabulary,
)
from palm_mtf.errors import UserError
from tests import processes
from tests.data.processes import disk_full_at
from tests.data.small_sources import ExampleSource, ListSource, store_of
from tests.log_lines import without_stamps
from tests.refusals import message_of

SHARD = 10_000  # bytes of text


@pytest.fixture
def source(code):
  return ListSource(code[5:], code[:5])


@pytest.fixture
def path(source, vocabulary, tmp_path):
  """A store of several shards."""
  path = tmp_path / "tokens" / "store"
  store_of(source, vocabulary, path, shard_bytes=SHARD)
  return path


def every_token(store) -> dict[str, list[int]]:
  return {
    split: read_all(getattr(store, split).tokens)
    for split in (TRAIN, VALIDATION)
  }


def read_all(tokens) -> list[int]:
  return tokens.read(0, len(tokens))[0].tolist()


def inodes(path) -> dict[str, tuple[int, int]]:
  return {
    each.name: (each.stat().st_ino, each.stat().st_mtime_ns)
    for each in pathlib.Path(path).iterdir()
  }


def test_a_split_is_its_documents_in_order_each_with_eod(
  path, source, vocabulary
):
  store = read_store(str(path))
  for name in (TRAIN, VALIDATION):
    split = getattr(store, name)
    texts = [d.text for each, d in source.documents() if each == name]
    tokens = np.array(read_all(split.tokens))
    documents = np.split(tokens, np.flatnonzero(tokens == 1) + 1)[:-1]
    assert [vocabulary.decode(ids) for ids in documents] == texts
    counts = split.counts
    assert tokens[-1] == vocabulary.eod_id
    assert counts.num_tokens == counts.num_target_tokens == len(tokens)
    assert counts.num_documents == len(texts) > 0
    assert counts.num_bytes == sum(len(text.encode()) for text in texts)
    assert counts.longest_document_tokens == max(map(len, documents))
    assert split.bytes_per_token == counts.num_bytes / len(tokens)
  ranks = [d.rank for _, d in source.documents()]
  assert store.lowest_rank == min(ranks)


def test_bytes_per_token_of_examples_are_those_of_their_targets(
  vocabulary, tmp_path
):
  example = Document("the targets", "these are much longer inputs")
  store = store_of(ExampleSource([example]), vocabulary, tmp_path / "a")
  learnt = len(vocabulary.encode(example.text)) + 1
  assert store.train.bytes_per_token == len(example.text) / learnt
  given = len(vocabulary.encode(example.inputs))
  assert store.train.counts.num_tokens == given + learnt
  assert store.train.tokens.has_inputs


def test_shards_hold_about_as_much_text_as_asked_for_repeats_included(
  path, source, vocabulary, tmp_path
):
  longest = max(d.num_bytes for _, d in source.documents())
  num_shards = len(list(path.glob("shard-*.json")))
  total = source.num_bytes
  assert total / (SHARD + longest) <= num_shards <= total / SHARD + 1
  assert num_shards > 5
  documents = [Document(f"text number {i}", weight=50.0) for i in range(20)]
  store_of(ListSource(documents), vocabulary, tmp_path / "a", shard_bytes=1000)
  assert len(list((tmp_path / "a").glob("shard-*.json"))) == 10


class Wide(SentencePieceVocabulary):
  """A vocabulary with the same ids, and more pieces than two bytes count."""

  def __init__(self, path, size):
    super().__init__(path, pathlib.Path(path).read_bytes(), what=path)
    self.size = size


@pytest.mark.parametrize(
  ("size", "limit"), [(65_536, 2.2), (65_537, 4.2), (256_000, 4.2)]
)
def test_a_token_takes_at_most_so_many_bytes_on_disk(
  vocabulary, code, tmp_path, size, limit
):
  text = "".join(code)
  source = ListSource(
    [text[i : i + 2000] for i in range(0, len(text), 2000)], code[:2]
  )
  wide = Wide(vocabulary.path, size)
  store = store_of(source, wide, tmp_path / "a")
  on_disk = sum(each.stat().st_size for each in (tmp_path / "a").iterdir())
  num_tokens = sum(
    split.counts.num_tokens for split in (store.train, store.validation)
  )
  assert on_disk <= limit * num_tokens
  assert on_disk >= (2 if size <= 65_536 else 4) * num_tokens
  narrow = store_of(source, vocabulary, tmp_path / "b")
  assert every_token(store) == every_token(narrow)


def test_the_fingerprint_changes_with_the_tokens(
  path, vocabulary, tmp_path, code
):
  changed = ListSource([*code[5:-1], code[-1] + "."], code[:5])
  again = store_of(changed, vocabulary, tmp_path / "b", shard_bytes=SHARD)
  assert again.fingerprint != read_store(str(path)).fingerprint


@pytest.mark.parametrize(
  ("name", "damage"),
  [
    ("train-00002.npy", "cut"),
    ("validation-00002.npy", "remove"),
    ("shard-00002.json", "cut"),
  ],
)
def test_only_the_damaged_shard_is_made_anew(
  path, source, vocabulary, name, damage
):
  whole, before = read_store(str(path)), inodes(path)
  expected = every_token(whole)
  if damage == "cut":
    os.truncate(path / name, (path / name).stat().st_size - 3)
  else:
    (path / name).unlink()
  with pytest.raises(DamagedShardError, match=name):
    read_store(str(path))
  store_of(source, vocabulary, path, shard_bytes=SHARD)
  after = inodes(path)
  assert set(after) == set(before)
  made = {n for n in after if after[n] != before[n]}
  assert made == {"manifest.json", *(n for n in after if "-00002." in n)}
  mended = read_store(str(path))
  assert mended.fingerprint == whole.fingerprint
  assert every_token(mended) == expected
  assert os.listdir(path.parent) == ["store"]


@pytest.mark.parametrize("content", ["", "null", '{"num_shards":2}'])
def test_a_damaged_manifest_is_found_and_no_shard_is_made_anew(
  path, source, vocabulary, content
):
  before = inodes(path)
  (path / "manifest.json").write_text(content)
  with pytest.raises(DamagedShardError, match=r"manifest\.json: its content"):
    read_store(str(path))
  store_of(source, vocabulary, path, shard_bytes=SHARD)
  after = inodes(path)
  assert {n for n in after if after[n] != before[n]} == {"manifest.json"}


def test_a_full_disk_is_named_and_what_is_finished_stays(
  code, vocabulary, tmp_path
):
  source, path = ListSource([*code, "".join(code)]), tmp_path / "store"
  # The limit of bytes per file; a shard with a longer document is larger.
  with disk_full_at(30_000):
    message = message_of(store_of, source, vocabulary, path, shard_bytes=20_000)
  assert message.startswith(
    f"no disk space left for {path}, which needs up to "
    f"{2 * source.num_bytes:,} bytes; free some, or choose another "
  )
  kept = inodes(f"{path}.partial")
  finished = {x: kept[x] for x in kept if x.startswith("shard-")}
  assert finished
  store_of(source, vocabulary, path, shard_bytes=20_000)
  assert finished.items() <= inodes(path).items()


def test_a_damaged_shard_that_another_process_reads_is_not_written_into(
  source, vocabulary, tmp_path
):
  path = tmp_path / "store"
  reader = store_of(source, vocabulary, path, shard_bytes=20_000)
  before, mapped = every_token(reader), inodes(path)["train-00000.npy"]
  os.truncate(path / "shard-00000.json", 9)
  store_of(source, vocabulary, path, shard_bytes=20_000)
  assert inodes(path)["train-00000.npy"] != mapped
  assert every_token(reader) == before


def test_an_error_of_reading_is_not_called_one_of_writing(
  source, vocabulary, tmp_path, monkeypatch
):
  def fail(self):
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

  monkeypatch.setattr(type(source), "documents", fail)
  with pytest.raises(OSError, match="Too many open files") as error:
    store_of(source, vocabulary, tmp_path / "store")
  assert not isinstance(error.value, UserError)


def test_a_source_without_any_document_is_an_empty_store(vocabulary, tmp_path):
  store = store_of(ListSource([]), vocabulary, tmp_path / "a")
  assert len(store.train.tokens) == len(store.validation.tokens) == 0
  assert (store.train.bytes_per_token, store.lowest_rank) == (0, 1.0)


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


def test_a_later_start_reads_neither_the_text_nor_the_tokens(run, monkeypatch):
  monkeypatch.setattr(files, "_SETTLED_NS", -(10**12))  # as if old
  first = run()
  monkeypatch.setattr(files, "hash_file", None)
  monkeypatch.setattr("palm_mtf.data.tokens.shard.hash_file", None)
  assert run().fingerprint == first.fingerprint


def test_text_that_changes_while_it_is_encoded_gets_no_tokens_of_its_old_name(
  run, folder, tmp_path, monkeypatch
):
  real = store_module.write_store

  def write(path, source, vocabulary, **settings):
    (folder / "003.txt").write_text("changed, since it was hashed")
    real(path, source, vocabulary, **settings)

  monkeypatch.setattr(store_module, "write_store", write)
  with pytest.raises(
    UserError, match=r"003\.txt: was changed while it was read"
  ):
    run()
  assert [x.suffix for x in stores(tmp_path / "run" / "tokens")] == [".partial"]


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


def test_a_changed_bit_is_found_where_every_byte_is_compared(
  run, cache, tmp_path, capsys
):
  first = run(cached=cache)
  (store,) = stores(cache)
  content = bytearray((store / "train-00000.npy").read_bytes())
  content[-1] ^= 1
  (store / "train-00000.npy").write_bytes(content)
  capsys.readouterr()
  run(cached=cache, command=cache_stores)
  assert capsys.readouterr().err == ""
  verify = functools.partial(cache_stores, verify=True)
  _, mended = run(cached=cache, command=verify)
  assert without_stamps(capsys.readouterr().err).startswith(
    f"palm_mtf: warning: damaged tokens are encoded again: {store}/"
    "train-00000.npy: its content is not what was written\n"
  )
  assert mended.fingerprint == first.fingerprint


def test_of_two_at_once_one_waits_and_both_get_the_tokens(
  run, tmp_path, capsys
):
  with futures.ThreadPoolExecutor(2) as threads:
    found = [threads.submit(run) for _ in range(2)]
  assert len({each.result().fingerprint for each in found}) == 1
  assert capsys.readouterr().err.count("encoded ") == 1
  assert len(stores(tmp_path / "run" / "tokens")) == 1


def test_a_process_waits_for_another_that_encodes_until_it_is_killed(
  run, tmp_path, capsys
):
  tokens = tmp_path / "run" / "tokens"
  tokens.mkdir(parents=True)
  hold = (
    "import fcntl, time; file = open('.lock', 'w'); "
    "fcntl.flock(file, fcntl.LOCK_EX); print('held', flush=True); "
    "time.sleep(600)"
  )
  holder = processes.start("-c", hold, cwd=tokens)
  assert holder.stdout.readline() == "held\n"
  threading.Timer(0.4, holder.kill).start()
  run()
  assert holder.poll() == -signal.SIGKILL
  assert without_stamps(capsys.readouterr().err).startswith(
    f"palm_mtf: waiting for another process that encodes into {tokens}\n"
  )
