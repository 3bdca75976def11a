# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from tests import runs


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return runs.write_corpus(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture
def cache(corpus, tmp_path, capsys):
  """Runs `data cache` on the corpus; returns what it printed."""

  def cache(*flags, **macros):
    model_dir = tmp_path / "run"
    macros = {"CACHE_DIR": str(tmp_path / "cache")} | macros
    arguments = runs.arguments("data", corpus, model_dir, **macros)
    arguments[1:1] = ["cache", *flags]
    code = runs.main(arguments)
    return code, *capsys.readouterr()

  return cache


def test_the_figures_are_those_of_the_files(cache, corpus, tmp_path):
  code, out, _ = cache("--json")
  assert code == 0
  (found,) = map(json.loads, out.splitlines())
  vocabulary = Vocabulary(str(tmp_path / "run" / "vocabulary.model"))
  texts = [path.read_text() for path in corpus.iterdir()]
  num_tokens = sum(len(vocabulary.encode(text)) + 1 for text in texts)
  (store,) = (each for each in (tmp_path / "cache").iterdir() if each.is_dir())
  on_disk = sum(each.stat().st_size for each in store.iterdir())
  splits = [np.load(store / f"{s}-00000.npy") for s in ("train", "validation")]
  text_bytes = sum(map(len, texts))
  assert found == {
    "source": "text_files",
    "path": str(store),
    "training_documents": int((splits[0] == vocabulary.eod_id).sum()),
    "validation_documents": int((splits[1] == vocabulary.eod_id).sum()),
    "training_tokens": len(splits[0]),
    "validation_tokens": len(splits[1]),
    "text_bytes": text_bytes,
    "text_bytes_per_token": text_bytes / num_tokens,
    "disk_bytes": on_disk,
    "disk_bytes_per_token": on_disk / num_tokens,
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


def test_the_second_time_nothing_is_encoded(cache):
  assert "palm_mtf: encoded " in cache()[2]
  assert cache()[2] == ""


def test_without_cache_dir_the_run_keeps_the_tokens(cache, tmp_path):
  (found,) = map(json.loads, cache("--json", CACHE_DIR=None)[1].splitlines())
  assert os.path.dirname(found["path"]) == str(tmp_path / "run" / "tokens")


@pytest.mark.parametrize(
  ("macros", "message"),
  [
    ({"TEXT_FILES": "/nowhere/*.txt"}, "TEXT_FILES = '/nowhere/*.txt': no fol"),
    ({"VOCAB_SIZE": 100_000}, "VOCAB_SIZE = 100000: too high"),
    ({"CACHE_DIR": ""}, "CACHE_DIR = '': give the path of a folder"),
  ],
)
def test_what_cannot_work_is_one_line(cache, macros, message):
  code, out, err = cache(**macros)
  assert (code, out) == (2, "")
  assert err.splitlines()[-1].startswith(f"palm_mtf: {message}")


# Runs the command in a process that may have so much more memory, and prints
# how much of it was used at most.
LIMITED = """
import functools, resource, sys
from palm_mtf.cli.main import main
from palm_mtf.data.tokens import cache, encoder, store
import rich.progress, sentencepiece, numpy

def used(kind):
  with open("/proc/self/status") as file:
    return int(file.read().split(kind)[1].split()[0]) << 10

{settings}
limit = {limit}
if limit:
  data = used("VmData:") + limit
  resource.setrlimit(resource.RLIMIT_DATA, (data, data))
before = used("VmHWM:")
code = main({arguments!r})
print("\\nmemory", used("VmHWM:") - before)
sys.exit(code)
"""
SMALL_SHARDS = """
write = functools.partial(store.write_store, shard_bytes=1 << 18)
cache.write_store = write
encoder._BATCH_CHARACTERS = 1 << 16
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
  """The vocabulary of another run; training one needs memory of its own."""
  cache()
  return str(tmp_path / "run" / "vocabulary.model")


def memory_of(tmp_path, num_bytes, vocabulary, *, settings="", limit=0) -> int:
  """Returns the bytes of memory that caching so much text takes."""
  path = tmp_path / f"{num_bytes}.jsonl"
  write_lines(path, num_bytes)
  arguments = runs.arguments(
    "data cache",
    tmp_path,
    tmp_path / "large",
    TEXT_FILES=str(path),
    VOCABULARY=vocabulary,
  )
  program = LIMITED.format(settings=settings, limit=limit, arguments=arguments)
  done = subprocess.run(
    [sys.executable, "-c", program],
    capture_output=True,
    text=True,
    check=False,
    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
  )
  assert done.returncode == 0, done.stderr
  return int(done.stdout.split("\nmemory ")[1])


def test_memory_does_not_grow_with_the_corpus(tmp_path, vocabulary):
  small = memory_of(tmp_path, 3 << 20, vocabulary, settings=SMALL_SHARDS)
  large = memory_of(tmp_path, 12 << 20, vocabulary, settings=SMALL_SHARDS)
  # Nine more megabytes of text, and about as many of tokens.
  assert large - small < 3 << 20


@pytest.mark.slow
def test_a_gigabyte_of_text_is_cached_in_a_fraction_of_its_memory(
  tmp_path, vocabulary
):
  limit = 400 << 20  # two shards in the making, and batches in flight
  memory_of(tmp_path, 1 << 30, vocabulary, limit=limit)
