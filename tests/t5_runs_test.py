# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf train` trains a T5 of gin/models from gin files, on pods."""

import gin
import numpy as np
import pytest

from palm_mtf._tf import mtf
from palm_mtf.cli.main import main
from tests import runs

# Rows of 32 tokens hold at most 2 spans of 3 tokens.
SETTINGS = {**runs.SETTINGS, "PROMPTS": [], "EXTRA_IDS": 20, "LOG_STEPS": 1}
TWO_PODS = ["pods/in_process.gin"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return runs.write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(autouse=True)
def clear_gin():
  yield
  gin.clear_config()


def call(command, files, **macros):
  flags = [f"--gin.{name}={value!r}" for name, value in macros.items()]
  return main([*command.split(), *(f"--gin_file={x}" for x in files), *flags])


def train(corpus, model_dir, *files, **macros):
  """Returns the metrics of a run, and the tensors of its last step."""
  macros = SETTINGS | {"FINGERPRINT_STEPS": 1} | macros
  given = {"MODEL_DIR": str(model_dir), "TEXT_FILES": f"{corpus}/*.txt"}
  files = ["recipes/t5_quickstart.gin", *files]
  assert call("train", files, **given, **macros) == 0
  lines = runs.read_metrics(model_dir)
  return lines, runs.read_tensors(model_dir, macros["TRAIN_STEPS"])


def test_a_t5_learns_on_two_pods_that_hold_the_same_bits(corpus, tmp_path):
  """The pods are compared after every step (FINGERPRINT_STEPS)."""
  macros = {"NUM_PODS": 2, "LEARNING_RATE": 0.05}
  lines, tensors = train(corpus, tmp_path / "run", *TWO_PODS, **macros)
  assert lines[-1]["num_pods"] == 2
  assert lines[-1]["loss"] < lines[0]["loss"] - 1
  assert lines[-1]["validation_loss"] < lines[0]["loss"] - 1
  assert not {"mfu", "dcn_bytes"} & lines[-1].keys()  # of PaLM's block
  assert tensors["decoder/block_000/layer_001/EncDecAttention/q"].any()


@pytest.mark.slow
def test_one_pod_two_and_two_in_servers_take_the_same_steps(corpus, tmp_path):
  one, expected = train(corpus, tmp_path / "one")
  for name, layout in (
    ("in_process", {}),
    ("local_servers", {}),
    (
      "in_process",
      {
        "MESH_SHAPE": "data:1,model:2",
        "LAYOUT": "batch:data,heads:model,d_ff:model,vocab:model",
        "NUM_MICROBATCHES": 2,
      },
    ),
  ):
    macros = {"NUM_PODS": 2, **layout}
    path = tmp_path / f"{name}{len(layout)}"
    lines, tensors = train(corpus, path, f"pods/{name}.gin", **macros)
    for ours, other in zip(lines, one, strict=True):
      assert ours["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert tensors.keys() == expected.keys()
    for key, value in expected.items():
      # Sums have another order, and each step's g / sqrt(v) amplifies rounding.
      difference = np.abs(tensors[key] - value).max()
      assert difference <= 1e-3 * np.abs(value).max() + 1e-12, key


@pytest.mark.slow
def test_a_t5_resumes_to_the_same_bits(corpus, tmp_path):
  _, whole = train(corpus, tmp_path / "whole")
  train(corpus, tmp_path / "run", TRAIN_STEPS=4)
  lines, tensors = train(corpus, tmp_path / "run")
  runs.assert_same(whole, tensors)
  assert len(lines) == SETTINGS["TRAIN_STEPS"]


@pytest.mark.slow
def test_rehearsed_tpus_have_the_losses_of_cpus(corpus, tmp_path, monkeypatch):
  layout = {"MESH_SHAPE": "data:4", "LAYOUT": "batch:data", "TRAIN_STEPS": 4}
  cpus, _ = train(corpus, tmp_path / "cpus", **layout)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  tpus, _ = train(corpus, tmp_path / "tpus", TPU="v4-8", **layout)
  for ours, other in zip(tpus, cpus, strict=True):
    assert ours["loss"] == pytest.approx(other["loss"], rel=1e-5)


@pytest.mark.parametrize(
  "command", ["plan", "evaluate", "generate", "score", "export", "serve"]
)
def test_commands_for_palms_block_refuse_a_t5(command, tmp_path, capsys):
  flags = {"export": f" --output {tmp_path}/out"}.get(command, "")
  files = ["recipes/t5_quickstart.gin"]
  assert call(f"{command}{flags}", files, MODEL_DIR=str(tmp_path)) == 2
  assert capsys.readouterr() == (
    "",
    'palm_mtf: MODEL_FUNCTION = "palm_mtf.unitransformer.bitransformer" '
    f"(models/t5_tiny.gin:3): `{command}` knows only PaLM's block; palm_mtf "
    "only trains such a model: read its weights by TensorFlow, from "
    "MODEL_DIR/checkpoints.\n",
  )


def test_a_t5_run_is_refused_before_its_config_has_to_be_trusted(
  tmp_path, capsys
):
  config = 'import os\nMODEL_FUNCTION = "own.t5"\nos.abort.now = True\n'
  (tmp_path / "config.gin").write_text(config)
  assert main(["generate", f"--model_dir={tmp_path}", "--prompt=a"]) == 2
  line = capsys.readouterr().err
  assert "`generate` knows only PaLM's block" in line and line.count("\n") == 1


def seven_logits(batch, dtype):
  """Returns logits of a smaller vocabulary."""
  targets = batch["targets"]
  shape = mtf.Shape([*targets.shape.dims, mtf.Dimension("vocab", 7)])
  bias = mtf.get_variable(targets.mesh, "bias", shape.dims[-1:])
  return mtf.broadcast(mtf.cast(bias, dtype), shape)


def no_logits(batch, unused_dtype):
  """Returns the targets."""
  return batch["targets"]


@pytest.mark.parametrize(
  ("macros", "message"),
  [
    ({"PROMPTS": ["a"]}, "PROMPTS = ['a'] and MODEL_FUNCTION = "),
    ({"REMAT": "layer"}, "set it."),
    ({"DROPOUT": 0.1}, "such a model trains only with DROPOUT = 0.0; set it."),
    ({"PREFERENCE_BETA": 0.1}, "only with PREFERENCE_BETA = None; set it."),
    ({"TASK_EVAL_STEPS": 5, "EVAL_TASKS": ["a"]}, "TASK_EVAL_STEPS = None"),
    ({"OBJECTIVE": "causal"}, 'OBJECTIVE = "causal": an encoder reads'),
    ({"MODEL_FUNCTION": "no_such.name"}, "No module named 'no_such'"),
    ({"MODEL_FUNCTION": "numpy.abs"}, "numpy.abs': TypeError: "),
    (
      {"MODEL_FUNCTION": "tests.t5_runs_test.seven_logits"},
      "vocab=7] of float32; return float logits [batch, length, vocab] of at "
      "least VOCAB_SIZE = ",
    ),
    (
      {"MODEL_FUNCTION": "tests.t5_runs_test.no_logits"},
      "] of int32; return float logits",
    ),
    (
      {"MESH_SHAPE": "data:2", "LAYOUT": "batch:data,d_model_stored:data"},
      'the model has no dimension "d_model_stored"',
    ),
    (
      {"TPU": "v4-8", "MESH_SHAPE": "data:4", "LAYOUT": "batch:data"}
      | {"PODS": "local_servers"},
      "such a model trains only with PODS = 'in_process'; set it.",
    ),
  ],
  ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_a_model_function_lacks_is_one_line(
  macros, message, tmp_path, capsys, monkeypatch
):
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  given = SETTINGS | {"MODEL_DIR": str(tmp_path), "TEXT_FILES": "a"} | macros
  assert call("train", ["recipes/t5_quickstart.gin"], **given) == 2
  out, err = capsys.readouterr()
  assert out == "" and message in err and err.count("\n") == 1


def test_after_a_recipe_of_palm_one_line_names_the_packing(tmp_path, capsys):
  files = ["recipes/quickstart.gin", "models/t5_tiny.gin"]
  assert call("train", files, MODEL_DIR=str(tmp_path)) == 2
  assert 'set PACKING = "packed" or "single"' in capsys.readouterr().err
