# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The messages of the page are given: by commands here, or by other tests.

tests/docs_test.py compares every message with the text of the program.
"""

import contextlib
import gzip
import re
import shutil
import sys

import pytest

from palm_mtf.cli.main import main
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.foreign_files import read_sealed, seal
from palm_mtf.model_dir.lock import training_lock
from tests import runs
from tests.source_files import ROOT, python_files, text_of

PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^\| `(.+?)` \|", PAGE, re.M)
RECIPE = ("--gin_file=recipes/quickstart.gin", "--gin.MODEL_DIR='run'")

# By the first words of a message, a command that gives it. `corpus` and
# `finished` are texts, and a run on them; mine.gin is in the current folder.
COMMANDS = {
  "unknown macro": ["train", *RECIPE, "--gin.NUM_LAYER=3"],
  "... not set; pass": ["train", RECIPE[0]],
  "...: gives a": ["train", *RECIPE, "--gin_file=mine.gin"],
  "FROZEN = ...: no parameter": ["train", *RECIPE, "--gin.FROZEN=['norm']"],
  "...: is not bound in gin": ["train", *RECIPE, "--gin_file=bound.gin"],
  "... = ...: give a whole number of at most": [
    *("train", *RECIPE, "--gin.NUM_LAYERS=1000000000")
  ],
  "... is not divisible by mesh axis": [
    *("train", *RECIPE, "--gin.MESH_SHAPE='data:1,model:3'"),
    "--gin.LAYOUT='batch:data,d_ff:model'",
  ],
  "NUM_LAYERS = ... is not divisible by STAGES = ...": [
    *("train", *RECIPE, "--gin.STAGES=7")
  ],
  "CHIP = ...": ["plan", *RECIPE, "--gin.CHIP='a1000'"],
  "... = None: not known for CHIP": [
    *("plan", *RECIPE, "--gin.CHIP='tpu_v3'", "--gin.NUM_PODS=2")
  ],
  "the measured rates cannot be kept": ["plan", "--calibrate"],
  "SWEEP_AT_ONCE": [
    *("sweep", *RECIPE, "--gin.SWEEP_AT_ONCE=1000"),
    "--gin.SWEEP_RUNS=[{'a': {'SEED': 1}}]",
  ],
  "... is not divisible by NUM_MICROBATCHES": [
    *("train", *RECIPE, "--gin.NUM_MICROBATCHES=3")
  ],
  "TASK = ... and TEXT_FILES": ["train", *RECIPE, "--gin.TASK='sums'"],
  "... = ...: no such SeqIO task": [
    *("train", *RECIPE, "--gin.TASK='sums'", "--gin.TEXT_FILES=None")
  ],
  "...: filters remove every document": [
    *("data cache", "{on_corpus}", "--gin.MIN_DOCUMENT_BYTES=1000000")
  ],
  "validation text of": ["train", "{on_corpus}", "--gin.GLOBAL_BATCH_SIZE=64"],
  "... has ...: it is of another model": [
    *("evaluate", "--model_dir={finished}", "--gin.D_FF=32")
  ],
  "MODEL_DIR = ...: ... trains there": ["train", "{on_corpus}"],
  "MODEL_DIR = ...: holds no checkpoint": ["evaluate", *RECIPE],
  "...: none of its": ["score", "--model_dir={damaged}", "--text=a"],
  "... is of another version": ["score", "--model_dir={later}", "--text=a"],
  "... = ...: is an address": [
    *("train", RECIPE[0], "--gin.MODEL_DIR='gs://bucket/run'")
  ],
  "...: is ...; convert the file": [
    *("score", "--model_dir={finished}", "--input=utf_16.txt")
  ],
  "...: is compressed": [
    *("score", "--model_dir={finished}", "--input=packed.txt")
  ],
  "...: begins with": [
    *("score", "--model_dir={finished}", "--input=lines.txt")
  ],
  "...: is one JSON array": [
    *("score", "--model_dir={finished}", "--input=array.json")
  ],
  "...: is ..., not text": [
    *("score", "--model_dir={finished}", "--input=table.txt")
  ],
  "...: is a device": [
    *("score", "--model_dir={finished}", "--input=/dev/zero")
  ],
  "--model_dir = ...": ["generate", "--model_dir=."],
  "...: ...: runs or permits code": ["generate", "--model_dir={code}"],
  "--slots": ["serve", "--model_dir={finished}", "--slots=900000000"],
}

# Messages that need servers, libraries or full disks, and the first words of
# the test that gives each of them.
TESTS = {
  "--compile needs libtpu": "test_compiling_needs_a_chip_that_it_knows_and_its",
  "--compile needs jax-cuda12-plugin": "test_compiling_needs_a_chip_that_it",
  "...: the compiled step does not fit": "test_settings_that_fit_are_found_by",
  "... returns ...; return a dict": "test_a_metric_function_that_returns_no",
  'SWEEP_RUNS "..."': "test_a_run_whose_settings_changed_is_refused_by_name",
  "MESH_SHAPE and NUM_PODS": "test_fewer_gpus_than_devices_is_an_error_with",
  "FROZEN = ...: ... was written": "test_a_frozen_run_resumes_and_its_weights",
  "... was trained with": "test_model_dir_of_another_vocabulary_is_refused",
  "cannot read ...: ...; mend that, or remove": "test_a_file_that_cannot_be",
  "cannot read ...: ...; mend that, or move": "test_what_cannot_be_read_just",
  "...: was changed while": "test_text_that_changes_while_it_is_encoded_gets",
  "has another kind of CPU": "test_another_kind_of_cpu_is_refused_by_its",
  "JAX failed in": "test_training_ends_with_one_line_and_its_checkpoint_is",
  "pod ...: the server": "test_a_server_on_which_jax_does_not_start_in_time_is",
  "TensorFlow cannot be loaded": "test_too_little_memory_for_tensorflow_is",
  "no ... can hold": "test_pods_that_no_island_can_hold_are_refused_before_a",
  "...: no manager answers": "test_where_no_manager_answers_is_one_line",
  "another manager uses it": "test_a_second_manager_on_the_same_file_is",
  "no disk space left": "test_what_the_disk_refuses_is_told_with_the_folder",
  "palm_mtf serve answers by aiohttp": "test_a_missing_library_is_one_line",
  "...: is no whole safetensors": "test_a_file_without_a_header_of_safetensors",
  "...: its ... holds a number": "test_a_number_that_is_not_finite_is_refused",
  "...: only ... is read": "test_other_weights_in_the_folder_are_refused_by",
  "... = ...: palm_mtf computes only": "test_a_setting_that_is_not_of_our",
  "...: other users can": "test_a_file_without_private_keys_is_one_error_line",
  "Host: ...": "test_a_server_on_loopback_answers_its_own_names_only",
}


@pytest.fixture(scope="module")
def places(corpus, finished, tmp_path_factory):
  """Folders that commands name; runs are copies of `finished`."""
  folder = tmp_path_factory.mktemp("errors")
  found = {"finished": finished}
  for name in ("damaged", "later", "code"):
    found[name] = shutil.copytree(finished, folder / name)
  for path in found["damaged"].glob("checkpoints/*/manifest.json"):
    path.write_text("{}")
  for path in found["later"].glob("checkpoints/*/manifest.json"):
    content, _ = read_sealed(str(path), "blake2b")
    content["a_field_of_later"] = 1
    path.write_text(json_text(seal(content, "blake2b")))
  config = found["code"] / "config.gin"
  config.write_text(f"import of_a_stranger\n{config.read_text()}")
  return {
    **found,
    "on_corpus": runs.arguments("train", corpus, folder / "empty")[1:],
  }


@pytest.fixture
def here(tmp_path, monkeypatch):
  """The current folder, with files that commands name."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / "of_mine.py").write_text("def size():\n  return object()\n")
  (tmp_path / "mine.gin").write_text(
    "import of_mine\nNUM_LAYERS = @of_mine.size()\n"
  )
  (tmp_path / "bound.gin").write_text(
    "from palm_mtf import config\nconfig.ModelConfig.num_layer = 3\n"
  )
  (tmp_path / "utf_16.txt").write_text("one two", encoding="utf-16")
  (tmp_path / "lines.txt").write_text('{"text": "one"}\n')
  (tmp_path / "array.json").write_text('[{"text": "one"}]')
  (tmp_path / "table.txt").write_bytes(b"PAR1\x15\x04")
  (tmp_path / "packed.txt").write_bytes(gzip.compress(b"one two"))
  yield tmp_path
  sys.modules.pop("of_mine", None)


def flat(words, places):
  """Returns a command with folders in the places of their names."""
  for word in words:
    if word == "{on_corpus}":
      yield from places["on_corpus"]
    else:
      for name, path in places.items():
        word = word.replace(f"{{{name}}}", str(path))
      yield word


@pytest.mark.parametrize("begins", COMMANDS)
def test_the_command_gives_the_message(
  begins, places, here, capsys, monkeypatch
):
  words, *rest = COMMANDS[begins]
  command = [*words.split(), *flat(rest, places)]
  if "cannot be kept" in begins:
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "mine.gin"))  # no folder
  with contextlib.ExitStack() as stack:
    if "trains there" in begins:
      model_dir = here / "run"
      model_dir.mkdir()
      command.append(f"--gin.MODEL_DIR={str(model_dir)!r}")
      stack.enter_context(training_lock(str(model_dir)))
    assert main(command) == 2
  *_, line = capsys.readouterr().err.splitlines()
  (message,) = [x for x in MESSAGES if x.startswith(begins)]
  pattern = ".*".join(re.escape(x) for x in message.split("..."))
  assert re.fullmatch(rf"palm_mtf: {pattern}( \(\w+ is set .*\))?", line), line


def test_the_other_messages_have_tests():
  text = "".join(map(text_of, python_files("tests")))
  for name in TESTS.values():
    found = re.findall(rf"^def ({name}\w*)\(", text, re.M)
    assert len(found) == 1, (name, found)


def test_every_message_has_its_test():
  known = [*COMMANDS, *TESTS]
  for message in MESSAGES:
    found = [begins for begins in known if message.startswith(begins)]
    assert len(found) == 1, (message, found)
  assert len(known) == len(MESSAGES)
