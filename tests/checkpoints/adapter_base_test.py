# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs that train an adapter of a trained model, and what reads them."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from palm_mtf.checkpoints.adapter_base import find_base
from palm_mtf.checkpoints.manifest import (
  find_checkpoints,
  read_checkpoint,
  write_manifest,
)
from palm_mtf.cli.gin_files import load_run
from palm_mtf.generation.serving.served_weights import ServedWeights
from palm_mtf.training.job import TrainJob, warn_of_slow_adapter
from tests import adapter_oracle, adapter_runs, runs
from tests.adapter_runs import KINDS
from tests.cases import slow

EVERY = ("q", "k", "v", "o", "wi_gate", "wi", "wo")


def adapt(base, model_dir, **macros):
  """Trains LoRA; returns the exit code."""
  return adapter_runs.train(base, model_dir, **{**KINDS["lora"], **macros})


def model_config(kind):
  """Returns the model of the runs of this module."""
  return adapter_runs.model_config(**KINDS[kind])


BOTH = ["lora", slow("dora")]


@pytest.mark.parametrize("kind", BOTH)
def test_checkpoints_have_only_the_adapter(base, adapted, kind):
  """Three tensors per parameter, with momentum and second moment."""
  held = runs.read_tensors(adapted(kind), 8)
  model, of_base = model_config(kind), runs.read_tensors(base, 12)
  names = adapter_oracle.kernels(model, EVERY)
  wanted = adapter_oracle.random_adapter(model, names, seed=0)
  parameters = {x: y for x, y in held.items() if "moment" not in x}
  assert {x: y.shape for x, y in parameters.items()} == {
    x: y.shape for x, y in wanted.items()
  }
  assert {x.rpartition("/")[0] for x in held.keys() - parameters} == {*wanted}
  numbers = [sum(x.size for x in y.values()) for y in (held, of_base)]
  assert numbers[0] < 0.15 * numbers[1]
  manifest = json.loads(
    (adapted(kind) / "checkpoints/step_00000008/manifest.json").read_text()
  )
  assert manifest["base"]["kind"] == "adapted"
  of_base = str(base / "checkpoints" / "step_00000012")
  assert manifest["base"]["checkpoint"] == of_base


@pytest.mark.parametrize("kind", BOTH)
def test_the_exported_model_is_merged(base, adapted, kind, tmp_path):
  run, model = adapted(kind), model_config(kind)
  parameters = runs.read_tensors(base, 12) | runs.read_tensors(run, 8)
  merged = adapter_oracle.merge(model, parameters)
  export = ["--model_dir", run, "--output", tmp_path / "out"]
  assert runs.main([str(x) for x in ("export", "--format=npz", *export)]) == 0
  with np.load(tmp_path / "out" / "weights.npz") as exported:
    assert exported.keys() == merged.keys()
    for name, value in merged.items():
      np.testing.assert_allclose(exported[name], value, 1e-6, 1e-6)
  change = max(np.abs(y - parameters[x]).max() for x, y in merged.items())
  assert change > 1e-3


@pytest.mark.parametrize("kind", BOTH)
def test_a_validation_loss_is_that_of_training(adapted, kind):
  """`evaluate` reads the base and the adapter."""
  run = adapted(kind)
  flags = ["--gin_file", run / "config.gin", "--json"]
  (loss,) = runs.printed("evaluate", *flags)
  (line,) = runs.read_metrics(run)[-1:]
  assert loss["validation_loss"] == pytest.approx(line["validation_loss"], 1e-6)


def test_a_resumed_run_has_the_same_bits(base, adapted, tmp_path):
  run = runs.copy_until(adapted("lora"), tmp_path / "run", 4)
  assert adapt(base, run) == 0
  runs.assert_same_tensors(adapted("lora"), run, 8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dora", "prompt"])
def test_a_run_in_bfloat16_resumes_and_is_evaluated(base, kind, tmp_path):
  """Its devices round the float32 weights of the base when they read them."""
  settings = {
    **KINDS[kind],
    "ACTIVATION_DTYPE": "bfloat16",
    "LAYOUT": "batch:data,heads:model,vocab:model",
    "MESH_SHAPE": "data:1,model:2",
  }
  one, other = tmp_path / "one", tmp_path / "other"
  for run, *steps in ((one, 8), (other, 4, 8)):
    for last in steps:
      train = {**settings, "TRAIN_STEPS": last}
      assert adapter_runs.train(base, run, **train) == 0
  runs.assert_same_tensors(one, other, 8)
  test_a_validation_loss_is_that_of_training({kind: one}.get, kind)


REFUSED = {
  "no base": ({"INIT_CHECKPOINT": None}, "name its checkpoint in INIT_CHECKP"),
  "no alpha": ({"ADAPTER_ALPHA": None}, "ADAPTER_ALPHA is missing"),
  "a state": ({"INIT_STATE": "all"}, "all weights of its base, and no more"),
  "no target": ({"ADAPTER_TARGETS": ["mlp/w"]}, "no kernel of a layer matches"),
  "another width": ({"D_FF": 128}, "it is of another model"),
  "all frozen": ({"FROZEN": ["*_lora_?"]}, "nothing is left to train"),
}


@pytest.mark.parametrize(("macros", "said"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_meaning_is_one_line(base, macros, said, tmp_path, capsys):
  assert adapt(base, tmp_path / "run", **macros) == 2
  error = capsys.readouterr().err.strip().splitlines()[-1]
  assert said in error
  assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
  ("change", "said"),
  [
    ("moved", "there is no checkpoint"),
    ("trained on", "has other weights than the base of"),
  ],
)
def test_another_base_is_refused(
  corpus, base, adapted, change, said, tmp_path, capsys
):
  """Also where a resumed run would read it."""
  run, other = tmp_path / "run", tmp_path / "base"
  shutil.copytree(adapted("lora"), run)
  if change == "trained on":
    shutil.copytree(base, other)
    more = {"TRAIN_STEPS": 13, "EVAL_STEPS": 13, "PROMPTS": []}
    assert runs.run("train", corpus, other, **more) == 0
  given = {"INIT_CHECKPOINT": str(other), "TRAIN_STEPS": 9}
  capsys.readouterr()
  assert adapt(base, run, **given) == 2
  assert said in capsys.readouterr().err.strip().splitlines()[-1]


def copy_base(base, tmp_path):
  """Returns a copy of a base, which a test may remove."""
  shutil.copytree(base, tmp_path / "base")
  return tmp_path / "base"


def test_an_adapter_without_its_base_is_not_decoded(base, tmp_path, capsys):
  moved, run = copy_base(base, tmp_path), tmp_path / "run"
  assert adapt(moved, run, TRAIN_STEPS=4) == 0
  shutil.rmtree(moved / "checkpoints")
  command = ["generate", "--model_dir", run, "--prompt", "one"]
  capsys.readouterr()
  assert runs.main([*map(str, command)]) == 2
  line = capsys.readouterr().err.splitlines()[-1]
  # `generate` has no INIT_CHECKPOINT to give another.
  assert f"the base of {run}" in line and "there is no checkpoint" in line
  assert "INIT_CHECKPOINT" not in line


def test_a_run_decodes_though_its_base_is_removed(base, tmp_path, monkeypatch):
  """The base may be a checkpoint of a run that keeps only the newest."""
  moved, begin = copy_base(base, tmp_path), TrainJob.record_kernels

  def remove(job, kernels):
    shutil.rmtree(moved / "checkpoints")
    return begin(job, kernels)

  monkeypatch.setattr(TrainJob, "record_kernels", remove)
  given = {"TRAIN_STEPS": 2, "PROMPTS": ["one two"]}
  assert adapt(moved, tmp_path / "run", **given) == 0
  assert (tmp_path / "run" / "samples.jsonl").read_text().count("one two")


@pytest.mark.slow
def test_a_server_follows_though_the_base_is_removed(base, tmp_path):
  moved, run = copy_base(base, tmp_path), tmp_path / "run"
  assert adapt(moved, run) == 0
  first, *_, last = find_checkpoints(str(run))
  _, config = load_run("generate", str(run), {})
  with ServedWeights(config, num_tokens=300, num_slots=2) as weights:
    weights.load(first)
    shutil.rmtree(moved / "checkpoints")
    weights.replace(last)
    assert weights.step == last.manifest.step > first.manifest.step


def config_on(base):
  """Returns the settings of a run that begins to adapt a base."""
  _, config = load_run("generate", str(base), {})
  adapter = {"adapter": "lora", "adapter_rank": 4, "adapter_alpha": 8.0}
  return dataclasses.replace(
    config,
    model=dataclasses.replace(config.model, **adapter),
    run=dataclasses.replace(config.run, init_checkpoint=str(base)),
  )


def test_a_base_of_another_function_is_a_warning(base, caplog):
  """Equal shapes do not show it, and only the adapter learns."""
  config = config_on(base)
  caplog.clear()
  find_base(config.run, None, config.model)
  assert not caplog.messages
  other = dataclasses.replace(config.model, rotary_base=9.0)
  find_base(config.run, None, other)
  (message,) = caplog.messages
  assert message.startswith("ROTARY_BASE = 9.0: ")
  assert "was trained with ROTARY_BASE = 10000" in message


def test_an_optimizer_that_holds_an_adapter_back_is_a_warning(base, caplog):
  """PaLM's updates are as small as the parameter, and B begins as 0."""
  config = config_on(base)
  model, optimizer = config.model, config.optimizer
  caplog.clear()
  warn_of_slow_adapter(model.base, optimizer)
  for free in ({"parameter_scale": "off"}, {"parameter_scale_floor": 0.5}):
    warn_of_slow_adapter(model, dataclasses.replace(optimizer, **free))
  assert not caplog.messages
  warn_of_slow_adapter(model, optimizer)
  (message,) = caplog.messages
  assert "PARAMETER_SCALE_FLOOR = 0.001 for them, and by 0.1 for" in message


def test_adapters_of_other_bases_are_not_equal(adapted, tmp_path):
  """`checkpoints compare` says so, though their own tensors are."""
  run = adapted("lora") / "checkpoints" / "step_00000008"
  other = tmp_path / "step_00000008"
  shutil.copytree(run, other)
  (other / "manifest.json").unlink()
  manifest = read_checkpoint(str(run)).manifest
  base = {**manifest.base, "blake2b": "0" * 32}
  write_manifest(str(other), dataclasses.replace(manifest, base=base))
  (found,) = runs.printed("checkpoints", "compare", run, other, "--json")
  assert not found["bitwise_equal"]
  hashes = [manifest.base["blake2b"], "0" * 32]
  assert found["other_settings"] == {"the base": hashes}
  (found,) = runs.printed("checkpoints", "compare", run, run, "--json")
  assert found["bitwise_equal"]
