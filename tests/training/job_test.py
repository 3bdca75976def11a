# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import json

import numpy as np
import pytest

from palm_mtf.checkpoints.manifest import newest_whole
from palm_mtf.cli.main import main
from palm_mtf.training.job import write_samples
from tests import runs


def kept(folder) -> list[tuple]:
  lines = (folder / "samples.jsonl").read_text().splitlines()
  return [tuple(json.loads(line).values()) for line in lines]


def test_samples_are_kept_in_the_order_of_steps_each_step_once(tmp_path):
  write_samples(str(tmp_path), 50, [], [])
  assert not list(tmp_path.iterdir())
  write_samples(str(tmp_path), 100, ["a", "b"], ["1", "2"])
  write_samples(str(tmp_path), 300, ["a"], ["later"])
  write_samples(str(tmp_path), 200, ["a"], ["taken back"])
  write_samples(str(tmp_path), 200, ["a"], ["again\n\u00e9"])
  assert kept(tmp_path) == [
    (100, "a", "1"),
    (100, "b", "2"),
    (200, "a", "again\n\u00e9"),
  ]


def test_a_ramp_that_the_run_does_not_reach_is_warned_about(tmp_path, capsys):
  """And nothing else is done, because the corpus is missing."""
  settings = {"GLOBAL_BATCH_SIZE": [[0, 4], [1, 8], [9, 16]], "TRAIN_STEPS": 1}
  assert runs.run("train", tmp_path / "none", tmp_path, **settings) == 2
  assert (
    "warning: TRAIN_STEPS = 1: ends before step 1, from where "
    "GLOBAL_BATCH_SIZE is 8\n"
  ) in capsys.readouterr().err


def test_xla_flags_that_fail_later_are_refused_before_data_is_made(
  corpus, tmp_path, capsys, monkeypatch
):
  flags = "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit"
  monkeypatch.setenv("TF_XLA_FLAGS", flags)
  settings = {"NUM_PODS": 2, "PODS": "in_process"}
  assert runs.run("train", corpus, tmp_path, **settings) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(f"palm_mtf: TF_XLA_FLAGS = '{flags}': ")
  assert not (tmp_path / "tokens").exists()


def test_a_run_resumes_with_the_layers_of_its_checkpoint_or_in_one_line(
  corpus, tmp_path, capsys
):
  """And another command reads the layers from the run's config.gin."""

  def train(layers, window, steps):
    return runs.run(
      *("train", corpus, tmp_path),
      NUM_LAYERS=2,
      LAYERS=layers,
      VARIANTS={"dense": {}, "banded": {"ATTENTION_WINDOW": window}},
      TRAIN_STEPS=steps,
      PROMPTS=[],
    )

  assert train("dense, banded", 4, 4) == train("dense, banded", 4, 6) == 0
  capsys.readouterr()
  for layers, window, said in (
    ("banded, dense", 4, "LAYERS = 'banded, dense': "),
    ("dense, banded", 5, "VARIANTS = {'dense': {}, 'banded': {'ATTENTION_W"),
  ):
    assert train(layers, window, 8) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"palm_mtf: {said}")
    assert "step_00000006 was trained with " in line
  assert main(["evaluate", f"--gin_file={tmp_path}/config.gin"]) == 0


@pytest.mark.slow
def test_finetuning_starts_from_the_weights_with_a_fresh_optimizer(
  corpus, finished, tmp_path, capsys
):
  settings = {
    "INIT_CHECKPOINT": str(finished),
    "VOCABULARY": str(finished / "vocabulary.model"),
    "LEARNING_RATE": 1e-9,  # so that one step changes almost nothing
    "PROMPTS": [],
  }
  assert runs.run("train", corpus, tmp_path, **settings, TRAIN_STEPS=1) == 0
  newest = newest_whole(str(finished))
  said = capsys.readouterr().err
  assert f"starting from the weights of {newest.path}, with step 0" in said
  start, tuned = runs.read_tensors(finished, 12), runs.read_tensors(tmp_path, 1)
  for name, value in start.items():
    if name.endswith("/momentum"):
      assert np.abs(tuned[name]).max() < 1e-8 < np.abs(value).max(), name
    elif not name.endswith("/second_moment"):
      np.testing.assert_allclose(tuned[name], value, 1e-6, 1e-8, err_msg=name)
  found = newest_whole(str(tmp_path)).manifest
  assert (found.step, found.next_row) == (1, 4)
  assert found.parent == newest.as_parent
  assert runs.run("train", corpus, tmp_path, **settings, TRAIN_STEPS=2) == 0
  assert "INIT_CHECKPOINT is not read" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_continues_with_the_optimizer_has_the_bits_of_one_run(
  corpus, finished, tmp_path, capsys
):
  """On the same data, because a batch is a function of (SEED, step)."""
  begun = finished / "checkpoints" / "step_00000008"
  settings = {
    "INIT_CHECKPOINT": str(begun),
    "INIT_STATE": "all",
    "VOCABULARY": str(finished / "vocabulary.model"),
    "PROMPTS": [],
  }
  code = runs.run("train", corpus, tmp_path, **settings, TRAIN_STEPS=8)
  assert code == 2
  said = capsys.readouterr().err
  assert (
    f"TRAIN_STEPS = 8: INIT_CHECKPOINT = {str(begun)!r} already has 8" in said
  )
  assert runs.run("train", corpus, tmp_path, **settings) == 0
  said = capsys.readouterr().err
  assert f"weights and optimizer of {begun}, with step 8" in said
  runs.assert_same_tensors(finished, tmp_path, 12)
  assert [x["step"] for x in runs.read_metrics(tmp_path)] == [10, 12]
  parent = newest_whole(str(tmp_path)).manifest.parent
  assert parent["checkpoint"] == "step_00000008"
