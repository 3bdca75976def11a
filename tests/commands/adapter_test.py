# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Commands export adapters, and decode a base with an adapter."""

import json

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from palm_mtf.lm_eval.run import Run
from tests import runs

FILE = "adapter_model.safetensors"
SHORT = {"TRAIN_STEPS": 2, "EVAL_STEPS": 2, "CHECKPOINT_STEPS": 2}
ADAPTER = {
  "ADAPTER": "lora",
  "ADAPTER_RANK": 3,
  "ADAPTER_ALPHA": 8.0,
  "ADAPTER_SCALE": "sqrt_rank",
  "ADAPTER_TARGETS": ["attention/*", "mlp/wo"],
  "PARAMETER_SCALE_FLOOR": 0.5,  # updates are in proportion, and B begins as 0
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  """Trains a base and an adapter; returns a folder of both and of a PEFT's."""
  folder = tmp_path_factory.mktemp("adapters")
  corpus = runs.write_corpus(folder / "texts")
  settings = {**SHORT, "PROMPTS": []}
  assert runs.run("train", corpus, folder / "base", **settings) == 0
  settings |= {
    "INIT_CHECKPOINT": str(folder / "base"),
    "VOCABULARY": str(folder / "base" / "vocabulary.model"),
  }
  assert runs.run("train", corpus, folder / "run", **settings, **ADAPTER) == 0
  assert export(folder / "run", folder / "peft") == 0
  return folder


def export(model_dir, output, *flags):
  """Exports a run; returns the exit code."""
  given = ("export", "--model_dir", model_dir, "--output", output, *flags)
  return runs.main([str(x) for x in given])


def score(model_dir, *flags):
  """Returns the log-likelihood of a text."""
  text = "--text", "one two three four five six seven", "--json"
  (found,) = runs.printed("score", "--model_dir", model_dir, *text, *flags)
  return found["log_likelihood"]


def test_a_base_with_an_adapter_is_the_adapted_run(folders):
  """The adapter of the run, and what the run exports for PEFT."""
  base, run = folders / "base", folders / "run"
  adapted = score(run)
  assert abs(adapted - score(base)) > 1e-3
  assert score(base, "--adapter", folders / "peft") == adapted
  assert score(base, "--adapter", run) == adapted
  # lm-evaluation-harness
  text = "", "one two three four five six seven"
  ((_, found),) = Run(str(base), {}, False, str(run)).scores([text])
  assert found.log_likelihood == adapted


@pytest.mark.slow
def test_other_commands_add_an_adapter(folders):
  given = "--model_dir", folders / "base", "--adapter", folders / "peft"
  flags = "--prompt", "one two three", "--json"
  texts, losses = (
    [
      runs.printed(command, *model, *more)
      for model in (given, ("--model_dir", folders / "run"))
    ]
    for command, more in (("generate", flags), ("evaluate", ["--json"]))
  )
  assert texts[0] == texts[1]
  loss = losses[1][0]["validation_loss"]
  assert losses[0][0]["validation_loss"] == pytest.approx(loss, 1e-6)


def test_merge_writes_the_whole_model(folders, tmp_path, capsys):
  assert export(folders / "run", tmp_path / "whole", "--merge") == 0
  config = json.loads((tmp_path / "whole" / "config.json").read_text())
  assert config["architectures"] == ["CohereForCausalLM"]
  assert export(folders / "run", tmp_path / "a.gguf", "--format=gguf") == 0
  assert "an adapter of a command-r in float32" in capsys.readouterr().out
  assert export(folders / "base", tmp_path / "base", "--merge") == 2
  assert "nothing to merge; leave --merge out" in capsys.readouterr().err


def refused(capsys, model_dir, adapter):
  """Returns the line with which a command refuses an adapter."""
  given = ("--model_dir", model_dir, "--adapter", adapter, "--text", "one")
  assert runs.main(["score", *map(str, given)]) == 2
  *_, line = capsys.readouterr().err.splitlines()
  return line


def test_an_adapter_of_another_model_is_refused(folders, tmp_path, capsys):
  base, run = folders / "base", folders / "run"
  assert "has no adapter" in refused(capsys, base, base)
  assert "has an adapter already" in refused(capsys, run, folders / "peft")
  (tmp_path / "adapter_config.json").write_bytes(
    (folders / "peft" / "adapter_config.json").read_bytes()
  )
  with safe_open(folders / "peft" / FILE, "np") as file:
    metadata = file.metadata()
  manifest = base / "checkpoints" / "step_00000002" / "manifest.json"
  digest = json.loads(manifest.read_text())["blake2b"]
  assert metadata["palm_mtf_base"] == digest
  tensors = load_file(folders / "peft" / FILE)
  save_file(tensors, tmp_path / FILE, {"palm_mtf_base": "5eed"})
  message = refused(capsys, base, tmp_path)
  assert "adapts a checkpoint with the hash 5eed, and" in message
  assert digest in message
