# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import gzip
import json
import shutil
import sys

import pytest

from palm_mtf.cli.main import main
from tests import runs
from tests.doc_pages import Page
from tests.seqio_testing import registries_restored

PAGE = Page("docs/data.md")
SIZES = [f"--gin.{name}={value!r}" for name, value in runs.SETTINGS.items()]


@pytest.fixture
def here(finished, tmp_path, monkeypatch):
  """The current folder: texts of the page's names, and its run."""
  monkeypatch.chdir(tmp_path)
  shutil.copytree(finished, tmp_path / "runs" / "first")
  (tmp_path / "texts").mkdir()
  lines = []
  for i in range(200):
    words = [runs.WORDS[(i + j) % 10] for j in range(50)]
    text = f"{i}: {' '.join(words)}"
    lines.append(json.dumps({"text": text, "score": i / 100}))
  lines += [*lines[-5:], '{"text": "red birds", "score": 1}']
  file = tmp_path / "texts" / "birds.jsonl.gz"
  file.write_bytes(gzip.compress("\n".join(lines).encode()))
  return tmp_path


@PAGE.shows("palm_mtf vocab --input")
def test_text_becomes_a_vocabulary_tokens_and_batches(block, here, capsys):
  vocab, cache, inspect = block.commands
  vocab[vocab.index("32000")] = "320"  # of little text
  assert main(vocab[1:]) == 0
  assert main([*cache[1:], *SIZES]) == 0
  assert [*(here / "cache").rglob("manifest.json")]
  capsys.readouterr()
  texts = "--gin.TEXT_FILES='texts/*.gz'"  # not all of Python's library
  assert main([*inspect[1:], *SIZES, texts]) == 0
  assert capsys.readouterr().out


@PAGE.shows("palm_mtf data cache")
def test_filters_remove_what_the_table_says(block, here, capsys):
  (command,) = block.commands
  assert main([*command[1:], *SIZES, "--json"]) == 0
  (counts,) = map(json.loads, capsys.readouterr().out.splitlines())
  names = ("low_quality", "too_short", "exact_duplicates")
  assert [counts[f"removed_{name}"] for name in names] == [50, 1, 5]


@PAGE.shows("# mine.gin")
def test_a_mixture_of_the_users_module_is_the_text(block, here, monkeypatch):
  monkeypatch.syspath_prepend(here)
  monkeypatch.delitem(sys.modules, "my_tasks", raising=False)
  (here / "mine.gin").write_text(block.text)
  lines = [f"{i} {' '.join(runs.WORDS)}\n" for i in range(200)]
  (here / "lines.txt").write_text("".join(lines))
  (here / "my_tasks.py").write_text("""
import functools
import seqio

seqio.TaskRegistry.add(
  "my_task",
  source=seqio.TextLineDataSource({"train": "lines.txt"}),
  preprocessors=[
    lambda lines: lines.map(lambda line: {"targets": line}),
    seqio.preprocessors.tokenize,
  ],
  output_features={
    "targets": seqio.Feature(seqio.SentencePieceVocabulary("none.model"))
  },
)
seqio.MixtureRegistry.add("my_mixture", ["my_task"], default_rate=1)
""")
  flags = ["--gin_file=mine.gin", "--gin.MODEL_DIR='runs/mine'"]
  with registries_restored():
    assert main(["data", "cache", *flags, *SIZES]) == 0


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested()
