# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tasks used only through gin, without a network."""

import json
import socket
import sys
from pathlib import Path

import pytest

from palm_mtf.cli import gin_files
from palm_mtf.data.sources.document import SPLITS
from palm_mtf.data.sources.text_files import open_sources
from palm_mtf.errors import UserError
from tests import processes

# Starts each request like a command, and reads all documents.
PROGRAM = """
import json, sys
import tests.tasks.gin_run_test as test

test.block_network(setattr)
from palm_mtf.machine.process import own_process

own_process()  # as `palm_mtf train` does; TensorFlow's import is faster
print(json.dumps([test.read(*each) for each in json.loads(sys.argv[1])]))
print("seqio" in sys.modules)
"""


class Blocked(socket.socket):
  def __init__(self, family=-1, *args, **keywords):
    if family in (-1, socket.AF_INET, socket.AF_INET6):
      blocked()
    super().__init__(family, *args, **keywords)


def blocked(*unused, **keywords):
  raise OSError("the network is not there")


def block_network(setattr) -> None:
  setattr(socket, "socket", Blocked)
  setattr(socket, "getaddrinfo", blocked)
  setattr(socket, "create_connection", blocked)


def read(files: list[str], macros: list[str]) -> dict[str, list] | str:
  """Returns the documents of each source of a run, or the error's message."""
  try:
    configuration = gin_files.load("train", files, macros)
    sources = open_sources(configuration.build()[1].data)
    for source in sources:
      source.fingerprint()
    documents = {
      source.name: [[split, d.text] for split, d in source.documents()]
      for source in sources
    }
  except UserError as error:
    return str(error)
  with open("config.gin", "w") as file:
    file.write(configuration.config_files()["config.gin"])
  return documents


TEXTS = [f"document {i}" for i in range(60)]


def request(*files: str, **macros: object) -> list:
  """Returns the gin files and macros of one run, added to the quickstart."""
  macros = {"MODEL_DIR": "run", **macros}
  return [
    ["recipes/quickstart.gin", *files],
    [f"{name}={value!r}" for name, value in macros.items()],
  ]


# A resumed run reads the config.gin of the run before it.
RESUMED = [["config.gin"], []]


def run(folder: Path, *requests: list) -> tuple[list, bool]:
  """Returns documents or an error for each; whether SeqIO was imported."""
  result = processes.python("-c", PROGRAM, json.dumps(requests), cwd=folder)
  assert result.returncode == 0, result.stderr
  *_, results, has_seqio = result.stdout.splitlines()
  return json.loads(results), has_seqio == "True"


def texts_of(documents: list[list[str]]) -> list[str]:
  return sorted(text for _, text in documents)


@pytest.fixture
def folder(tmp_path) -> Path:
  """Makes the user's folder: text.jsonl, a module with a task, and its gin."""
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
  (tmp_path / "missing.gin").write_text("import my_task\n")
  return tmp_path


def test_text_files_need_neither_a_network_nor_seqio(folder):
  (documents,), has_seqio = run(
    folder,
    request("data/text.gin", TEXT_FILES="text.jsonl", VALIDATION_SHARE=0.3),
  )
  assert texts_of(documents["text_files"]) == sorted(TEXTS)
  assert {split for split, _ in documents["text_files"]} == set(SPLITS)
  assert not has_seqio


def test_a_task_of_the_users_module_needs_an_import_and_no_network(
  folder, monkeypatch
):
  block_network(monkeypatch.setattr)
  monkeypatch.chdir(folder)
  monkeypatch.delitem(sys.modules, "my_tasks", raising=False)
  requests = request("mine.gin"), RESUMED, request("missing.gin")
  documents, resumed, missing = (read(*each) for each in requests)
  expected = sorted(f"{text}!" for text in TEXTS)
  assert texts_of(documents["mine"]) == expected
  assert resumed == documents
  assert missing == (
    "missing.gin:1: import my_task: No module named 'my_task'; is it installed?"
  )


@pytest.mark.slow
def test_the_palm_mixture_is_set_by_gin_alone_and_survives_in_config(folder):
  names = ["social_media", "web_pages", "books", "code", "wikipedia", "news"]
  (folder / "palm.gin").write_text(
    "include 'data/palm_mixture.gin'\n"
    + "".join(f'palm_mixture.{x}.files = "text.jsonl"\n' for x in names[1:])
  )
  setting = {"palm_mixture.social_media.files": "text.jsonl"}
  (documents, resumed, unset), _ = run(
    folder, request("palm.gin", **setting), RESUMED, request("palm.gin")
  )
  assert {name: texts_of(each) for name, each in documents.items()} == {
    f"palm_{name}": sorted(TEXTS) for name in names
  }
  assert resumed == documents
  assert unset.startswith(
    "palm_mixture.social_media.files is not set: give a glob"
  )


@pytest.mark.slow
def test_without_seqio_a_task_is_refused_in_one_line(folder):
  (folder / "seqio.py").write_text("import editdistance_is_not_there\n")
  (error,), _ = run(folder, request("data/seqio_task.gin", TASK="mine"))
  assert error == (
    "TASK = 'mine': SeqIO cannot be imported: No module named "
    "'editdistance_is_not_there'; pip install editdistance_is_not_there, see "
    "palm_mtf doctor, or use TEXT_FILES."
  )
