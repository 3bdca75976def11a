# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import collections
import functools
import json
import pathlib
import time

import numpy as np
import pytest

from palm_mtf.commands.data import count_epochs
from palm_mtf.config import CacheConfig, DataConfig
from palm_mtf.config.run import BatchSizes
from palm_mtf.data.sources.document import Document
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.training import train_vocabulary
from tests import processes, runs
from tests.data.small_sources import ExampleSource, ListSource, corpus_of
from tests.mtf_testing import small_config


@pytest.fixture
def cache(corpus, tmp_path, on_corpus):
  folder = str(tmp_path / "cache")
  return functools.partial(on_corpus, "data cache", corpus, CACHE_DIR=folder)


def test_the_figures_are_those_of_the_files(cache, corpus, tmp_path):
  code, out, _ = cache("--json")
  assert code == 0
  (found,) = map(json.loads, out.splitlines())
  vocabulary = open_vocabulary(str(tmp_path / "run" / "vocabulary.model"))
  texts = [path.read_text() for path in corpus.iterdir()]
  num_tokens = sum(len(vocabulary.encode(text)) + 1 for text in texts)
  (folder,) = (x for x in (tmp_path / "cache").iterdir() if x.is_dir())
  on_disk = sum(each.stat().st_size for each in folder.iterdir())
  splits = [np.load(folder / f"{s}-00000.npy") for s in ("train", "validation")]
  text_bytes = sum(map(len, texts))
  assert found == {
    "source": "text_files",
    "path": str(folder),
    "training_documents": int((splits[0] == vocabulary.eod_id).sum()),
    "validation_documents": int((splits[1] == vocabulary.eod_id).sum()),
    "training_tokens": len(splits[0]),
    "validation_tokens": len(splits[1]),
    "text_bytes": text_bytes,
    "text_bytes_per_token": text_bytes / num_tokens,
    "disk_bytes": on_disk,
    "disk_bytes_per_token": on_disk / num_tokens,
    "rate": 1.0,
    "epochs": 12 * 4 * 32 / len(splits[0]),
  }
  assert found["training_tokens"] + found["validation_tokens"] == num_tokens
  assert found["training_documents"] + found["validation_documents"] == 40


def test_people_get_the_same_figures_in_lines(cache, tmp_path):
  _, lines, _ = cache()
  (found,) = map(json.loads, cache("--json")[1].splitlines())
  printed = dict(line.split(maxsplit=1) for line in lines.splitlines() if line)
  assert float(printed.pop("secs")) >= 0
  assert list(printed) == list(found)
  for name, value in found.items():
    if isinstance(value, str):
      assert printed[name] == value
    else:
      got = float(printed[name].replace(",", ""))
      assert got == pytest.approx(value, abs=1e-3)


@pytest.mark.parametrize(
  ("macros", "message"),
  [
    ({"TEXT_FILES": "/nowhere/*.txt"}, "TEXT_FILES = '/nowhere/*.txt': no fol"),
    ({"VOCAB_SIZE": 100_000}, "VOCAB_SIZE = 100000: too high"),
    ({"CACHE_DIR": ""}, "CACHE_DIR = '': give the path of a folder"),
    ({"TRAIN_STEPS": 0}, "TRAIN_STEPS = 0: give a whole number of at least 1"),
  ],
)
def test_what_cannot_work_is_one_line(cache, macros, message):
  code, out, err = cache(**macros)
  assert (code, out) == (2, "")
  assert err.splitlines()[-1].startswith(f"palm_mtf: {message}")


# Prints by how many bytes the command exceeds the peak memory of its imports.
MEASURED = """
import functools, sys
from palm_mtf.cli.main import main
from palm_mtf.data.tokens import encoder, store
import rich.progress, sentencepiece, numpy

def most():
  with open("/proc/self/status") as file:
    return int(file.read().split("VmHWM:")[1].split()[0]) << 10

# With small shards and batches, the part in memory is the same for any text.
write = functools.partial(store.write_store, shard_bytes=1 << 18)
store.write_store = write
encoder._BATCH_CHARACTERS = 1 << 16
before = most()
code = main({arguments!r})
print("\\nmemory", most() - before)
sys.exit(code)
"""


def write_lines(path, num_bytes) -> None:
  """Writes JSON lines of synthetic documents, all different."""
  words = "the of and to in is you that it he was for on are as with".split()
  rng = np.random.default_rng(0)
  with open(path, "w") as file:
    written = number = 0
    while written < num_bytes:
      text = " ".join(words[i] for i in rng.integers(16, size=2000))
      for _ in range(20):
        number += 1
        line = json.dumps({"text": f"{number} {text}\n"}) + "\n"
        written += file.write(line)


@pytest.fixture
def vocabulary(cache, tmp_path) -> str:
  """A trained vocabulary, because training one would need memory too."""
  cache()
  return str(tmp_path / "run" / "vocabulary.model")


def memory_of(tmp_path, num_bytes, vocabulary) -> int:
  """Returns the bytes of memory that caching `num_bytes` of text takes."""
  path = tmp_path / f"{num_bytes}.jsonl"
  write_lines(path, num_bytes)
  arguments = runs.arguments(
    "data cache",
    tmp_path,
    tmp_path / "large",
    TEXT_FILES=str(path),
    VOCABULARY=vocabulary,
  )
  done = processes.python("-c", MEASURED.format(arguments=arguments))
  assert done.returncode == 0, done.stderr
  return int(done.stdout.split("\nmemory ")[1])


@pytest.mark.slow  # two processes
def test_memory_does_not_grow_with_the_corpus(tmp_path, vocabulary):
  small = memory_of(tmp_path, 3 << 20, vocabulary)
  large = memory_of(tmp_path, 12 << 20, vocabulary)
  # The text has nine more megabytes, and so do the tokens, roughly.
  assert large - small < 3 << 20


def text_of(number: int) -> str:
  """Returns a text whose words occur in no other text."""
  return " ".join(f"{word}{number}" for word in runs.WORDS * (number % 7 + 1))


@pytest.fixture
def lines(tmp_path):
  """JSON lines with 60 texts; 20 occur twice, 10 have a low score."""
  folder = tmp_path / "lines"
  folder.mkdir()
  texts = [text_of(i) for i in range(60)]
  found = [(text, 0.2 if i < 10 else 0.8) for i, text in enumerate(texts)]
  found += found[20:40]
  content = [json.dumps({"text": t, "score": q}) + "\n" for t, q in found]
  (folder / "a.jsonl").write_text("".join(content))
  return folder


FILTERS = {
  "QUALITY_FIELD": "score",
  "MIN_QUALITY": 0.5,
  "REMOVE_DUPLICATES": "exact",
}


@pytest.fixture
def cache_lines(lines, tmp_path, on_corpus):
  """Caches the lines; returns the path of the store and the printed JSON."""

  def run(folder, **macros):
    code, out, err = on_corpus(
      "data cache",
      lines,
      "--json",
      CACHE_DIR=str(tmp_path / folder),
      TEXT_FILES=f"{lines}/*.jsonl",
      VOCAB_SIZE=300,
      **macros,
    )
    assert code == 0, err
    found = json.loads(out)
    return pathlib.Path(found["path"]), found

  return run


def test_what_filters_removed_is_in_the_report_and_in_the_manifest(cache_lines):
  """A manifest without filters is what it was before there were any."""
  kept, plain = cache_lines("plain")
  path, found = cache_lines("filtered", **FILTERS)
  counts = {
    "documents_read": 80,
    "removed_low_quality": 10,
    "removed_too_short": 0,
    "removed_too_long": 0,
    "removed_contaminated": 0,
    "removed_exact_duplicates": 20,
    "removed_near_duplicates": 0,
    "removed_by_attributes": 0,
  }
  assert {name: found[name] for name in counts} == counts
  assert json.loads((path / "manifest.json").read_text())["filters"] == counts
  assert not counts.keys() & plain.keys()
  manifest = json.loads((kept / "manifest.json").read_text())
  assert manifest == {"num_shards": 1, "seal": manifest["seal"]}
  assert not [*kept.parent.glob("removed-*")]
  for split in ("training_documents", "validation_documents"):
    assert found[split] < plain[split]
  assert found["training_documents"] + found["validation_documents"] == 50


@pytest.mark.parametrize("moment", ["removed-*", "*.partial"])
def test_filtering_that_was_killed_resumes_to_the_same_store(
  lines, cache_lines, tmp_path, moment
):
  whole, found = cache_lines("undisturbed", **FILTERS)
  folder = tmp_path / "killed"
  folder.mkdir()  # the filters' decisions are stored there too
  process = runs.start(
    "data cache",
    lines,
    tmp_path / "run",
    CACHE_DIR=str(folder),
    TEXT_FILES=f"{lines}/*.jsonl",
    VOCAB_SIZE=300,
    **FILTERS,
  )
  while not [*folder.glob(moment)] and process.poll() is None:
    time.sleep(0.001)
  process.kill()
  process.communicate()
  again, counts = cache_lines("killed", **FILTERS)
  assert runs.read_files(again) == runs.read_files(whole)
  assert {**counts, "path": ""} == {**found, "path": ""}


SIZES, STEPS, LENGTH = BatchSizes([[0, 20], [30, 40]]), 100, 24


def documents(count, seed, *, examples=False):
  """Returns texts of any length below a row; some are repeated."""
  rng = np.random.default_rng(seed)
  return [
    Document(
      "ab " * int(rng.integers(1, 6)),
      inputs="c " * int(rng.integers(1, 4)) if examples else None,
      weight=float(rng.choice([1.0, 1.0, 0.5, 2.0])),
    )
    for _ in range(count)
  ]


@pytest.fixture
def trained(tmp_path):
  path = str(tmp_path / "vocabulary.model")
  train_vocabulary(["ab c never read in training\n" * 20], 290, path=path)
  return open_vocabulary(path)


def settings(packing) -> CacheConfig:
  return CacheConfig(
    model=small_config(sequence_length=LENGTH),
    data=DataConfig(
      text_files="{stdlib}",
      vocabulary=None,
      validation_share=0.1,
      packing=packing,
    ),
    train_steps=STEPS,
    global_batch_size=SIZES.pairs,
    seed=3,
  )


@pytest.mark.parametrize(
  "packing", ["joined", "joined_masked", "packed", "single"]
)
def test_epochs_are_those_of_the_rows_that_a_run_reads(
  packing, trained, tmp_path
):
  held_out = ["never read in training"] * 9
  sources = [
    ListSource(documents(300, 0), held_out, name="large", rate=0.7),
    ExampleSource(
      documents(40, 1, examples=True), held_out, name="small", rate=0.3
    ),
  ]
  corpus = corpus_of(
    sources,
    trained,
    tmp_path,
    packing=packing,
    sequence_length=LENGTH,
    seed=3,
  )
  found = count_epochs(settings(packing), sources, corpus.stores, trained)
  batches, read = corpus.batches(SIZES), collections.Counter()
  for step in range(STEPS):
    for row in batches.pieces(step):
      for piece in row:
        read[piece.source] += piece.tokens
  for source, store, reading in zip(sources, corpus.stores, found, strict=True):
    # All documents fit into a row: each epoch reads all of its tokens.
    epochs = read[source.name] / len(store.train.tokens)
    assert reading["epochs"] == pytest.approx(epochs, rel=0.03)
  large, small = found
  assert large["rate"] == pytest.approx(0.7, abs=1e-4)
  assert small["epochs"] > 2 * large["epochs"] > 2


def test_the_epochs_of_a_run_follow_from_its_steps_rows_and_tokens(cache):
  run = {"TRAIN_STEPS": 30, "GLOBAL_BATCH_SIZE": [[0, 4], [10, 8]]}
  found = json.loads(cache("--json", **run)[1])
  tokens = (10 * 4 + 20 * 8) * runs.SETTINGS["SEQUENCE_LENGTH"]
  assert found["epochs"] == pytest.approx(tokens / found["training_tokens"])
  assert found["rate"] == 1
  assert "epochs" not in json.loads(cache("--json", TRAIN_STEPS=None)[1])
