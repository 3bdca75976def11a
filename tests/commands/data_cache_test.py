# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import functools
import json

import numpy as np
import pytest

from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from tests import processes, runs


@pytest.fixture
def cache(corpus, tmp_path, on_corpus):
  folder = str(tmp_path / "cache")
  return functools.partial(on_corpus, "data cache", corpus, CACHE_DIR=folder)


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


# Prints how much more memory the command used at most than its imports did.
MEASURED = """
import functools, sys
from palm_mtf.cli.main import main
from palm_mtf.data.tokens import cache, encoder, store
import rich.progress, sentencepiece, numpy

def most():
  with open("/proc/self/status") as file:
    return int(file.read().split("VmHWM:")[1].split()[0]) << 10

# Small shards and batches: what of them is in memory is the same for any text.
write = functools.partial(store.write_store, shard_bytes=1 << 18)
cache.write_store = write
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
  """The vocabulary of another run; training one needs memory of its own."""
  cache()
  return str(tmp_path / "run" / "vocabulary.model")


def memory_of(tmp_path, num_bytes, vocabulary) -> int:
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
  done = processes.python("-c", MEASURED.format(arguments=arguments))
  assert done.returncode == 0, done.stderr
  return int(done.stdout.split("\nmemory ")[1])


def test_memory_does_not_grow_with_the_corpus(tmp_path, vocabulary):
  small = memory_of(tmp_path, 3 << 20, vocabulary)
  large = memory_of(tmp_path, 12 << 20, vocabulary)
  # Nine more megabytes of text, and about as many of tokens.
  assert large - small < 3 << 20
