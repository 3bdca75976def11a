# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole runs of TPUs, whose place virtual CPU devices take."""

import numpy as np
import pytest

from palm_mtf.training.step import TrainStep
from tests import runs

SETTINGS = {
  "TPU": "v4-8",
  "MESH_SHAPE": "data:2,model:2",
  "LAYOUT": "batch:data,heads:model,d_ff:model,vocab:model,d_model_stored:data",
  "LOG_STEPS": 3,
  "CHECKPOINT_STEPS": 8,
  "PROMPTS": [],
}


# Each step makes every weight ten times as large.
DIVERGING = {"LEARNING_RATE_SCHEDULE": "constant", "LEARNING_RATE": 10.0}


@pytest.fixture(name="calls")
def calls_of_loops(monkeypatch):
  """Returns a list with the number of steps of each call."""
  calls = []
  run_loop = TrainStep.run_loop

  def count(self, batches, step):
    calls.append(len(batches))
    return run_loop(self, batches, step)

  monkeypatch.setattr(TrainStep, "run_loop", count)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  return calls


def train(corpus, model_dir, **macros):
  return runs.run("train", corpus, model_dir, **SETTINGS, **macros)


@pytest.mark.slow
def test_a_run_in_loops_leaves_what_one_in_steps_does(
  corpus, finished, calls, tmp_path
):
  """Also if the run is stopped and resumed, and loops begin at other steps."""
  in_steps, in_loops = (tmp_path / x for x in ("steps", "loops"))
  assert train(corpus, in_steps) == 0
  assert not calls
  for steps in (7, 12):
    looped = {"STEPS_PER_LOOP": 2, "TRAIN_STEPS": steps}
    assert train(corpus, in_loops, **looped) == 0
  # Up to lines at 3, 6, 9 and 12, losses at 6 and 12, a checkpoint at 8.
  assert calls == [2, 1, 2, 1, 1, *(1, 1, 2, 1)]
  expected = runs.read_tensors(in_steps, 12)
  near = runs.read_tensors(finished, 12)  # on a CPU
  found = runs.read_tensors(in_loops, 12)
  runs.assert_same(expected, found)
  for name, value in found.items():
    np.testing.assert_allclose(value, near[name], rtol=1e-3, atol=1e-4)
  of_steps, of_loops = (
    {x["step"]: runs.without_times(x) for x in runs.read_metrics(folder)}
    for folder in (in_steps, in_loops)
  )
  for step in (3, 6, 9, 12):
    assert of_loops[step] == of_steps[step]


@pytest.mark.slow
def test_a_step_in_a_loop_that_diverges_is_named(
  corpus, calls, tmp_path, capsys
):
  messages = []
  for steps in (1, 4):
    macros = {"STEPS_PER_LOOP": steps, "TRAIN_STEPS": 60, **DIVERGING}
    assert train(corpus, tmp_path / str(steps), **macros) == 2
    messages.append(capsys.readouterr().err.splitlines()[-1])
  assert calls
  assert messages[1] == messages[0].replace("/1/", "/4/")
  assert "training has diverged; the first tensor that is not" in messages[0]


def test_missing_tpus_are_found_before_any_work(corpus, tmp_path, capsys):
  model_dir = tmp_path / "run"
  assert train(corpus, model_dir) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert 'TPU = "v4-8": JAX finds no TPU on this machine' in line
  assert "JAX_PLATFORMS=cpu" in line
  assert not list(model_dir.glob("*"))
