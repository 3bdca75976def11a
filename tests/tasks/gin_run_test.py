# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tasks through gin alone, in processes of their own, without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("seqio", reason="SeqIO is not installed")

# What a command does first; then it reads all documents of the run.
PROGRAM = """
import json, socket, sys
from palm_mtf.errors import UserError

class Blocked(socket.socket):
  def __init__(self, family=-1, *args, **keywords):
    if family in (-1, socket.AF_INET, socket.AF_INET6):
      raise OSError("the network is not there")
    super().__init__(family, *args, **keywords)

def blocked(*args, **keywords):
  raise OSError("the network is not there")

socket.socket = Blocked
socket.getaddrinfo = socket.create_connection = blocked

from palm_mtf.cli import gin_files
files, macros = json.loads(sys.argv[1])
try:
  configuration = gin_files.load("train", files, macros)
  data = configuration.build()[1]["data"]
  from palm_mtf.data.open_sources import open_sources
  sources = open_sources(data)
  for source in sources:
    source.fingerprint()
  read = {
    source.name: [[split, d.text] for split, d in source.documents()]
    for source in sources
  }
  config = configuration.config_files()["config.gin"]
  print(json.dumps({
    "read": read,
    "config": config,
    "seqio": "seqio" in sys.modules,
  }))
except UserError as error:
  print(error, file=sys.stderr)
  sys.exit(2)
"""

RECIPE = [
  "models/palm_tiny.gin",
  "layouts/single.gin",
  "optim/palm.gin",
  "recipes/quickstart.gin",
]
TEXTS = [f"document {i}" for i in range(60)]


def run(folder: Path, files: list[str], **macros: object):
  """Reads the documents of a run that is started in `folder`."""
  macros = {"MODEL_DIR": "run", **macros}
  arguments = [
    [*RECIPE, *files],
    [f"{name}={value!r}" for name, value in macros.items()],
  ]
  return subprocess.run(
    [sys.executable, "-c", PROGRAM, json.dumps(arguments)],
    cwd=folder,
    capture_output=True,
    text=True,
    check=False,
    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
  )


def read(folder: Path, files: list[str], **macros: object) -> dict:
  result = run(folder, files, **macros)
  assert result.returncode == 0, result.stderr
  return json.loads(result.stdout.splitlines()[-1])


def texts_of(documents: list[list[str]]) -> list[str]:
  return sorted(text for _, text in documents)


@pytest.fixture
def folder(tmp_path) -> Path:
  """Where the user works: text.jsonl, and a module with a task and its gin."""
  lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
  (tmp_path / "text.jsonl").write_text("".join(lines))
  (tmp_path / "my_tasks.py").write_text("""
import functools
import gin
import seqio
import tensorflow as tf

@gin.configurable
def mark(dataset, end="."):
  return dataset.map(lambda line: {"targets": line + end})

seqio.TaskRegistry.add(
  "mine",
  source=seqio.TextLineDataSource({"train": "lines.txt"}),
  preprocessors=[
    lambda dataset: mark(dataset),
    seqio.preprocessors.tokenize,
    seqio.preprocessors.append_eos,
  ],
  output_features={
    "targets": seqio.Feature(seqio.SentencePieceVocabulary("/none.model"))
  },
)
""")
  (tmp_path / "lines.txt").write_text("\n".join(TEXTS))
  (tmp_path / "mine.gin").write_text(
    "include 'data/seqio_task.gin'\n"
    "import my_tasks\n"
    'TASK = "mine"\n'
    'my_tasks.mark.end = "!"\n'
  )
  return tmp_path


def test_text_files_need_neither_a_network_nor_seqio(folder):
  result = read(
    folder, ["data/text.gin"], TEXT_FILES="text.jsonl", VALIDATION_SHARE=0.3
  )
  assert texts_of(result["read"]["text_files"]) == sorted(TEXTS)
  assert not result["seqio"]


def test_a_task_of_the_users_module_needs_an_import_and_no_network(folder):
  result = read(folder, ["mine.gin"])
  expected = sorted(f"{text}!" for text in TEXTS)
  assert texts_of(result["read"]["mine"]) == expected
  # A resumed run reads config.gin alone, and so the same.
  (folder / "config.gin").write_text(result["config"])
  again = read(folder, ["config.gin"])
  assert again["read"] == result["read"]


def test_the_palm_mixture_is_set_by_gin_alone_and_survives_in_config(folder):
  names = ["social_media", "web_pages", "books", "code", "wikipedia", "news"]
  (folder / "palm.gin").write_text(
    "include 'data/palm_mixture.gin'\n"
    + "".join(f'palm_mixture.{x}.files = "text.jsonl"\n' for x in names[1:])
  )
  missing = run(folder, ["palm.gin"])
  assert missing.returncode == 2
  assert missing.stderr.splitlines()[-1].startswith(
    "palm_mixture.social_media.files is not set: give a glob"
  )
  setting = {"palm_mixture.social_media.files": "text.jsonl"}
  result = read(folder, ["palm.gin"], **setting)
  assert result["read"].keys() == {f"palm_{name}" for name in names}
  assert all(
    texts_of(documents) == sorted(TEXTS)
    for documents in result["read"].values()
  )
  (folder / "config.gin").write_text(result["config"])
  assert read(folder, ["config.gin"])["read"] == result["read"]


@pytest.mark.parametrize(
  ("name", "message"),
  [
    (
      "palm_mixture.books.filez",
      "doesn't have a parameter named 'filez'",
    ),
    ("palm_mixture.bookz.files", "has no attribute bookz"),
    ("palm_mixtures.books.files", 'no import provides "palm_mixtures"'),
  ],
)
def test_what_a_task_does_not_know_is_one_line(folder, name, message):
  result = run(folder, ["data/palm_mixture.gin"], **{name: "text.jsonl"})
  assert result.returncode == 2
  line = result.stderr.splitlines()[-1]
  assert message in line
  assert name in line


def test_a_module_that_is_not_there_is_named(folder):
  (folder / "mine.gin").write_text(
    "include 'data/seqio_task.gin'\nimport my_task\nTASK = 'mine'\n"
  )
  result = run(folder, ["mine.gin"])
  assert result.returncode == 2
  assert result.stderr.splitlines()[-1] == (
    "mine.gin:2: import my_task: No module named 'my_task'; is it installed?"
  )


def test_without_seqio_a_task_is_refused_in_one_line(folder):
  (folder / "seqio.py").write_text("import editdistance_is_not_there\n")
  result = run(folder, ["data/seqio_task.gin"], TASK="mine")
  assert result.returncode == 2
  assert result.stderr.splitlines()[-1] == (
    "TASK = 'mine': SeqIO cannot be imported: No module named "
    "'editdistance_is_not_there'; pip install editdistance_is_not_there, see "
    "palm_mtf doctor, or use TEXT_FILES."
  )
