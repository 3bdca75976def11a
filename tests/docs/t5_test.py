# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import re
import shlex

import pytest
import seqio

from palm_mtf.cli.main import main
from tests import runs
from tests.cases import needs_t5
from tests.doc_pages import Page
from tests.seqio_testing import registries_restored
from tests.source_files import ROOT
from tests.unitransformer.encoder_decoder_test import T5

pytestmark = needs_t5

PAGE = Page("docs/t5.md")


@pytest.fixture(autouse=True)
def registries():
  # Once imported, the tasks stay registered.
  import t5.data.mixtures
  import t5.data.tasks  # noqa: F401

  with registries_restored():
    yield


@PAGE.shows("pip install 'palm_mtf[t5]'")
def test_both_commands_are_those_that_the_makefile_runs(block):
  first, second = map(shlex.split, block.text.splitlines())
  assert first == ["pip", "install", "palm_mtf[t5]"]
  makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
  assert f"-qq {second[2]} '{second[3]}'" in makefile
  assert second[:3] == ["pip", "install", "--no-deps"]


@PAGE.shows("# mine.gin: GLUE as T5 has it")
def test_a_mixture_and_tasks_of_t5s_are_found_by_gin_alone(
  block, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "mine.gin").write_text(block.text)
  flags = ["--gin_file=mine.gin", "--gin.MODEL_DIR='run'", "--print_config"]
  assert main(["train", *flags]) == 0


@PAGE.shows("import palm_mtf  # before t5")
def test_a_task_with_a_source_of_the_users_is_registered(block):
  splits = {"train": 1, "validation": 1}
  source = seqio.FunctionDataSource(
    lambda split, shuffle_files=False, seed=None: None,
    [*splits],
    num_input_examples=splits,
  )
  names = {"my_source": source}
  exec(block.text, names)
  assert seqio.TaskRegistry.get("my_cola") is names["task"]
  assert names["task"].source is source


@PAGE.shows('VOCABULARY = "sentencepiece.model"')
def test_sentinels_have_the_ids_of_the_page(block, tmp_path, monkeypatch):
  """T5's vocabulary has 32,000 pieces; vocabulary_test.py computes ids."""
  monkeypatch.chdir(tmp_path)
  shown = dict(re.findall(r"^(\w+) = (\S+)", block.text, re.M))
  size = 32_000 + int(shown["EXTRA_IDS"])
  sentinels = re.findall(r"<extra_id_(\d)> (?:has )?id (\d+)", block.text)
  assert sentinels
  for number, found in sentinels:
    assert int(found) == size - 1 - int(number)
  least = re.search(r"at least (\d+)", block.text)[1]
  assert size == int(least) <= int(shown["VOCAB_SIZE"])
  (tmp_path / "mine.gin").write_text(
    f"include 'recipes/quickstart.gin'\n{block.text}MODEL_DIR = 'run'\n"
  )
  assert main(["train", "--gin_file=mine.gin", "--print_config"]) == 0


@pytest.mark.slow
@PAGE.shows("palm_mtf train --gin_file=recipes/quickstart.gin")
def test_blanks_are_learned_inspected_and_filled(
  block, corpus, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  train, inspect, generate = block.commands
  few = {"VOCAB_SIZE": 420, "TRAIN_STEPS": 2, "EVAL_STEPS": 2, "PROMPTS": []}
  settings = {**runs.SETTINGS, **few, "TEXT_FILES": f"{corpus}/*.txt"}
  sizes = [f"--gin.{name}={value!r}" for name, value in settings.items()]
  assert main([*train[1:], *sizes]) == 0
  capsys.readouterr()
  assert main(inspect[1:]) == 0
  assert "<extra_id_0>" in capsys.readouterr().out
  assert main(generate[1:]) == 0
  assert capsys.readouterr().out.startswith("--- 'def <extra_id_0>(self):'")


@PAGE.shows("palm_mtf train --gin_file=recipes/t5_quickstart.gin")
def test_the_recipe_of_a_t5_has_one_pod_and_two(block, capsys):
  for command, pods in zip(block.commands, (1, 2), strict=True):
    assert main([*command[1:], "--print_config"]) == 0
    assert f"\nNUM_PODS = {pods}  #" in capsys.readouterr().out


def test_the_table_has_the_parameters_of_every_file():
  counts = re.findall(r"^\| `(t5_\w+)` \| ([\d,]+) \|", PAGE.text, re.M)
  tiny = ("t5_tiny", "1,443,584")
  assert counts == [*((x, f"{T5[x][0]:,}") for x in T5), tiny]


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested()
