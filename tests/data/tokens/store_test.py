# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import errno
import os
import pathlib

import numpy as np
import pytest

from palm_mtf.data.sources.document import TRAIN, VALIDATION, Document
from palm_mtf.data.tokens.shard import DamagedShardError
from palm_mtf.data.tokens.store import read_store
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError
from tests import processes
from tests.data.processes import disk_full_at
from tests.data.small_sources import ExampleSource, ListSource, store_of

SHARD = 40_000  # bytes of text


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
  for split in (store.train, store.validation):
    name = TRAIN if split is store.train else VALIDATION
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


class Wide(Vocabulary):
  """A vocabulary with the same ids, and more pieces than two bytes count."""

  def __init__(self, path, size):
    super().__init__(path)
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


def test_the_fingerprint_is_that_of_the_tokens(
  path, source, vocabulary, tmp_path, code
):
  fingerprint = read_store(str(path)).fingerprint
  changed = ListSource([*code[5:-1], code[-1] + "."], code[:5])
  for documents in (source, changed):
    again = store_of(
      documents,
      vocabulary,
      tmp_path / documents.fingerprint(),
      shard_bytes=SHARD,
    )
    assert (again.fingerprint == fingerprint) == (documents is source)


@pytest.mark.parametrize(
  "name", ["train-00002.npy", "validation-00002.npy", "shard-00002.json"]
)
@pytest.mark.parametrize("damage", ["cut", "remove"])
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
  assert made == {
    "train-00002.npy",
    "train-00002.documents.npy",
    "validation-00002.npy",
    "validation-00002.documents.npy",
    "shard-00002.json",
    "manifest.json",
  }
  mended = read_store(str(path))
  assert mended.fingerprint == whole.fingerprint
  assert every_token(mended) == expected
  assert os.listdir(path.parent) == ["store"]


@pytest.mark.parametrize(
  "content", ["", "{}", "[]", "null", '{"num_shards":2}']
)
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


STOPPED = """
import time
from palm_mtf.data.tokens.store import write_store
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.data import worker_pool
from tests.data.small_sources import ListSource

worker_pool._BATCHES_BEFORE_PROCESSES = 0

class Slow(ListSource):
  def documents(self):
    for number, each in enumerate(super().documents()):
      if number == {stop}:
        print("stopped", flush=True)
        time.sleep(60)
      yield each

texts = [f"document {{i}}\\n" * 500 for i in range(40)]
write_store({path!r}, Slow(texts), Vocabulary({vocabulary!r}),
            num_processes={processes}, shard_bytes=20_000)
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_writer_is_followed_by_one_that_goes_on(
  vocabulary, tmp_path, workers
):
  texts = [f"document {i}\n" * 500 for i in range(40)]
  path = str(tmp_path / "store")
  program = STOPPED.format(
    path=path, vocabulary=vocabulary.path, stop=30, processes=workers
  )
  process = processes.start("-c", program)
  assert process.stdout.readline() == "stopped\n"
  process.kill()
  process.communicate(timeout=20)
  assert not os.path.exists(path)
  finished = inodes(f"{path}.partial")
  assert sum(name.startswith("shard-") for name in finished) >= 5
  settings = {"shard_bytes": 20_000}
  store = store_of(ListSource(texts), vocabulary, path, **settings)
  assert finished.items() <= inodes(path).items()
  once = store_of(ListSource(texts), vocabulary, tmp_path / "once", **settings)
  assert store.fingerprint == once.fingerprint
  assert every_token(store) == every_token(once)
  assert sorted(os.listdir(tmp_path)) == ["once", "store"]


def test_a_full_disk_is_named_and_what_is_finished_stays(
  source, vocabulary, tmp_path
):
  path = tmp_path / "store"
  # The limit of bytes per file; a first shard with a longer document is larger.
  with disk_full_at(30_000), pytest.raises(UserError) as info:
    store_of(source, vocabulary, path, shard_bytes=20_000)
  assert str(info.value).startswith(
    f"no disk space left for {path}, which needs up to "
    f"{2 * source.num_bytes:,} bytes; free some, or choose another "
  )
  finished = {
    name: kept
    for name, kept in inodes(f"{path}.partial").items()
    if name.startswith("shard-")
  }
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
