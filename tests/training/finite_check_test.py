# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole runs that meet infinity or what is no number: named, never saved."""

import shutil

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.checkpoints.manifest import find_checkpoints
from palm_mtf.checkpoints.writer import write_checkpoint
from palm_mtf.mesh.session import session_config
from palm_mtf.programs.train_program import build_train_program
from palm_mtf.training.finite_check import FiniteCheck
from palm_mtf.training.step import NonFiniteStepError, TrainStep
from tests import runs
from tests.checkpoint_files import save_tensors
from tests.mtf_testing import (
  PALM_OPTIMIZER,
  SINGLE,
  load_parameters,
  mesh_layout,
  random_tokens,
  small_config,
)
from tests.oracle import random_parameters


def plant(model_dir, name, place, value):
  """Rewrites the checkpoint of step 12 with `value` in a place of a tensor."""
  tensors = runs.read_tensors(model_dir, 12)
  tensors[name][place] = value

  def write_weights(prefix):
    names = {key.replace("/", "__"): x for key, x in tensors.items()}
    save_tensors(prefix, **names)

  newest = find_checkpoints(str(model_dir))[-1]
  write_checkpoint(str(model_dir), newest.manifest, write_weights, keep=10)


@pytest.mark.parametrize(
  ("planted", "message"),
  [
    (
      ("embedding", (7, 3), np.nan),
      "loss = nan, z_loss = nan, grad_norm = nan at step 13: training has "
      "diverged; the first tensor that is not finite is the parameter "
      "embedding, before the step.",
    ),
    (
      ("layer_000/mlp/wi_gate", (0, 0), np.inf),
      "is the parameter layer_000/mlp/wi_gate, before the step.",
    ),
    (
      ("final_norm/scale", slice(None), 1e25),  # squares of logits overflow
      "the first tensor that is not finite is the z_loss, of parameters that "
      "all are.",
    ),
  ],
)
def test_a_run_stops_with_step_tensor_and_last_good_checkpoint(
  planted, message, corpus, finished, tmp_path, capsys
):
  model_dir = shutil.copytree(finished, tmp_path / "copy")
  plant(model_dir, *planted)
  before = runs.read_files(model_dir / "checkpoints")
  settings = {"TRAIN_STEPS": 16, "LOG_STEPS": 1, "CHECKPOINT_STEPS": 1}
  assert runs.run("train", corpus, model_dir, **settings) == 2
  error = capsys.readouterr().err
  assert message in error, error
  path = model_dir / "checkpoints" / "step_00000012"
  assert error.endswith(f"The last good checkpoint is {path}.\n")
  assert runs.read_files(model_dir / "checkpoints") == before
  assert runs.read_metrics(model_dir)[-1]["step"] == 12


def test_an_update_that_overflows_is_never_saved(
  corpus, finished, tmp_path, capsys
):
  """The step's own loss and gradients are finite."""
  model_dir = shutil.copytree(finished, tmp_path / "copy")
  plant(model_dir, "layer_000/mlp/wo/second_moment", (2, 1), np.inf)
  assert runs.run("train", corpus, model_dir, TRAIN_STEPS=13) == 2
  error = capsys.readouterr().err
  assert (
    "layer_000/mlp/wo is not finite after step 13 (as are 2 other variables)"
    in error
  )
  assert not (model_dir / "checkpoints" / "step_00000013").exists()


def all_values(session, program):
  return session.run(
    {
      f"{name}/{i}": part.variable.read_value()
      for name, parts in program.slices.items()
      for i, part in enumerate(parts)
    }
  )


def test_a_bad_step_changes_no_bit_of_any_variable():
  config = small_config(num_layers=1)
  mesh = mesh_layout("vocab over model")
  batch = random_tokens(config, batch_size=4, seed=0)
  params = random_parameters(config, seed=1)
  with (
    tf.Graph().as_default(),
    tf.Session(config=session_config(mesh.num_devices)) as session,
  ):
    program = build_train_program(
      config, mesh, PALM_OPTIMIZER, batch_size=4, seed=0
    )
    session.run(program.initialize)
    train_step = TrainStep(session, program)
    metrics = train_step.run(batch, 0)
    feed = {
      program.pods[0].features[name]: value for name, value in batch.items()
    }
    losses, squares, is_finite = session.run(
      [program.losses, program.gradient_squares, program.is_finite],
      {**feed, program.step: 1},
    )
    assert is_finite
    assert np.sqrt(squares.sum()) == pytest.approx(losses["grad_norm"])
    assert losses.keys() < metrics.keys()

    params["layer_000/norm/scale"][0] = np.nan
    load_parameters(session, program.slices, params)
    before = all_values(session, program)
    with pytest.raises(NonFiniteStepError) as bad:
      train_step.run(batch, 1)
    runs.assert_same(before, all_values(session, program))
    watch = FiniteCheck(session, program, lambda: None)
    error = watch.error_of_step(bad.value)
    assert "the parameter layer_000/norm/scale, before the step" in str(error)


def test_the_gradient_that_was_computed_first_is_named():
  config = small_config()
  with tf.Graph().as_default(), tf.Session() as session:
    program = build_train_program(
      config, SINGLE, PALM_OPTIMIZER, batch_size=4, seed=0
    )
    session.run(program.initialize)
    watch = FiniteCheck(session, program, lambda: None)
    losses = {"loss": 5.0, "z_loss": 0.1, "grad_norm": np.inf}
    squares = np.ones(len(program.parameters))
    first, second = (
      program.parameters.index(f"layer_00{i}/mlp/wo") for i in range(2)
    )
    squares[first], squares[second] = np.nan, np.inf
    error = watch.error_of_step(NonFiniteStepError(7, losses, squares))
  assert str(error) == (
    "loss = 5.0, z_loss = 0.1, grad_norm = inf at step 7: training has "
    "diverged; the first tensor that is not finite is the gradient of "
    "layer_001/mlp/wo. Nothing of it is saved; lower LEARNING_RATE. There is "
    "no checkpoint yet."
  )
