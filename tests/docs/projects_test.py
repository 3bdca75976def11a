# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The page's examples of plain gin, Mesh TensorFlow and pods run.

tests/packaging_test.py trains a separate project from a wheel, and
tests/foreign_models/example_test.py runs the example.
"""

import importlib
import math
import re
import shutil
import sys

import gin
import numpy as np
import pytest

from palm_mtf.cli.gin_files import load
from palm_mtf.cli.main import main
from tests import runs
from tests.doc_pages import Page
from tests.seqio_testing import registries_restored
from tests.source_files import ROOT

PAGE = Page("docs/projects.md")


@pytest.fixture
def plain_gin(monkeypatch):
  """Puts back what a block changes in gin."""
  config = importlib.import_module("gin.config")
  monkeypatch.setattr(
    config, "_LOCATION_PREFIXES", config._LOCATION_PREFIXES[:]
  )
  gin.clear_config()
  yield
  gin.clear_config()


def run(block):
  """Runs a block of Python; returns its names."""
  names = {}
  exec(compile(block.text, "docs/projects.md", "exec"), names)
  return names


@PAGE.shows('include "palm_mtf/gin/models/palm_8b.gin"')
def test_plain_gin_and_our_commands_include_a_file_of_the_package(
  block, plain_gin, tmp_path, monkeypatch
):
  gin.parse_config(block.text)
  assert gin.query_parameter("%NUM_LAYERS") == 32  # PaLM 8B (Table 1)
  monkeypatch.chdir(tmp_path)
  (tmp_path / "mine.gin").write_text(block.text)
  name = block.text.split('"')[1]
  for file in ("mine.gin", name):
    found = load("train", ["recipes/quickstart.gin", file], ["MODEL_DIR='x'"])
    assert found.macros["NUM_LAYERS"].value == 32


@PAGE.shows("import gin, palm_mtf\n\ngin.add_config")
def test_plain_gin_reads_a_recipe_and_has_the_value_shown(block, plain_gin):
  run(block)
  call, _, shown = block.text.splitlines()[-1].partition("  # ")
  assert eval(call) == int(shown)


@PAGE.shows("palm_mtf train --gin_file=own.gin")
def test_the_commands_of_the_own_project_have_a_valid_configuration(
  block, tmp_path, monkeypatch, capsys
):
  folder = shutil.copytree(ROOT / "examples" / "own_project", tmp_path / "own")
  monkeypatch.chdir(folder)
  train, *others = block.commands
  assert train[1:] == ["train", "--gin_file=own.gin", '--gin.MODEL_DIR="run"']
  assert main([*train[1:], "--print_config"]) == 0
  (folder / "run").mkdir()
  (folder / "run" / "config.gin").write_text(capsys.readouterr().out)
  for command in others:
    assert main([*command[1:], "--print_config"]) == 0
    assert 'TASK = "own_sums"' in capsys.readouterr().out
  with registries_restored():
    configuration = load("train", ["run/config.gin"])
    model_dir, config = configuration.build()  # which imports own_tasks
  assert (model_dir, config.model.d_model) == ("run", 64)


@PAGE.shows("import palm_mtf\nimport mesh_tensorflow as mtf")
def test_mesh_tensorflow_is_imported_as_shown(block):
  names = run(block)
  assert names["mtf"].Dimension("d", 4).size == 4
  assert names["mesh_tensorflow"].transformer.transformer.Unitransformer


@PAGE.shows("import gin, palm_mtf\nfrom mesh_tensorflow")
def test_a_unitransformer_of_our_layers_is_made_as_shown(block, plain_gin):
  model = run(block)["model"]
  for method in ("call_simple", "sample_autoregressive", "beam_search"):
    assert method in block.text
    assert callable(getattr(model, method))
  assert len(model.layer_stack._layers) == 32


@PAGE.shows("# own_text.py")
def test_a_users_function_makes_the_model_of_a_run(
  block, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / "own_text.py").write_text(block.text)
  corpus, run = runs.write_corpus(tmp_path / "texts"), tmp_path / "run"
  (function,) = re.findall(r"`MODEL_FUNCTION = \"([\w.]+)\"`", PAGE.text)
  macros = {"MODEL_FUNCTION": function, "PROMPTS": [], "LEARNING_RATE": 0.1}
  assert runs.run("train", corpus, run, **macros) == 0
  first, *_, last = runs.read_metrics(run)
  assert last["loss"] < first["loss"] - 1
  shapes = {x: y.shape for x, y in runs.read_tensors(run, 12).items()}
  assert shapes["logits/kernel"] == (128, 4096)


@PAGE.shows("import numpy as np\nfrom palm_mtf import foreign_models")
def test_a_model_function_trains_on_two_pods_as_shown(block):
  names = run(block)
  kernel = names["values"]["kernel"]
  assert kernel.shape == (64,) and np.isfinite(kernel).all()
  assert math.isfinite(names["metrics"]["loss"])
  assert names["training"].num_steps == 1


@PAGE.shows("# own.gin")
def test_the_gin_file_of_a_model_function_trains_it(
  block, plain_gin, tmp_path, monkeypatch, capsys
):
  function = next(
    x.text for x in PAGE.blocks if "def loss(mesh" in x.text
  ).partition("\n\n\n")[2]
  (tmp_path / "own_model.py").write_text(
    "import gin\nimport mesh_tensorflow as mtf\nimport numpy as np\n\n\n"
    f"@gin.configurable\n{function.partition(chr(10) * 3)[0]}\n\n\n"
    "@gin.configurable\n"
    "def batches(step):\n  return {'x': np.ones([16, 64])}\n"
  )
  (tmp_path / "own.gin").write_text(block.text)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  program = next(x.text for x in PAGE.blocks if "main([" in x.text)
  monkeypatch.setattr(
    sys, "argv", ["train.py", "--gin.train_on_pods.num_steps=1"]
  )
  with pytest.raises(SystemExit, match="0"):
    exec(compile(program, "docs/projects.md", "exec"), {})
  assert "after 1 steps all pods hold the same bits" in capsys.readouterr().out


@PAGE.shows("import sys\nfrom palm_mtf import foreign_models")
def test_the_flag_that_the_page_names_is_one_of_the_program(
  block, plain_gin, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "own.gin").write_text("import palm_mtf.foreign_models\n")
  (flag,) = re.findall(r"`--gin\.(PodsConfig\S+)`", PAGE.text)
  monkeypatch.setattr(sys, "argv", ["train.py", f"--gin.{flag}"])
  with pytest.raises(SystemExit, match="2"):
    exec(compile(block.text, "docs/projects.md", "exec"), {})
  assert "train_on_pods.training is not set" in capsys.readouterr().err
  assert gin.get_configurable("PodsConfig")().num_pods == 1


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested(
    ".venv/bin/python examples/t5_on_two_pods/train.py"  # flags: docs_test.py
  )
