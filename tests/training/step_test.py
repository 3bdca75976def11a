# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Stages take the steps of one mesh with the same microbatches, to the bit."""

import concurrent.futures
import contextlib
import dataclasses
import threading

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.config import PodsConfig
from palm_mtf.mesh.cpu_gpu import local_devices
from palm_mtf.mesh.session import session_config
from palm_mtf.programs.train_program import build_train_program
from palm_mtf.runtime.client.client import Client
from palm_mtf.training.step import NonFiniteStepError, TrainStep
from tests import runs
from tests.blocks import SETTINGS
from tests.mtf_testing import (
  PALM_OPTIMIZER,
  SINGLE,
  mesh_layout,
  random_documents,
  random_examples,
  small_config,
  train,
)
from tests.settings import ADAMW, MUON, PALM_LOSS, step_config

TWO_PODS = PodsConfig(num_pods=2, dcn_dtype="bfloat16")
DROPPING = dataclasses.replace(PALM_LOSS, dropout=0.3)
STACKED = dataclasses.replace(
  PALM_OPTIMIZER, parameter_scale="stacked", second_moment="factored"
)


def assert_same_bits(config, mesh, optimizer=PALM_OPTIMIZER, **settings):
  settings = {"num_steps": 2, "batch_size": 8, "seed": 3, **settings}
  whole, expected = train(
    config, optimizer, mesh=dataclasses.replace(mesh, stages=1), **settings
  )
  staged, metrics = train(config, optimizer, mesh=mesh, **settings)
  assert metrics == expected
  assert staged.keys() == whole.keys()
  for name, value in whole.items():
    np.testing.assert_array_equal(staged[name], value, err_msg=name)


def in_stages(stages, num_microbatches, layout=None, **changes):
  mesh = mesh_layout(layout) if layout else SINGLE
  return dataclasses.replace(
    mesh, stages=stages, num_microbatches=num_microbatches, **changes
  )


def test_stages_take_the_steps_of_one_mesh():
  """With documents, dropout and other layers on each stage, in bfloat16."""
  config = small_config(
    activation_dtype="bfloat16",
    layers="window, global",
    variants={
      "window": {"ATTENTION_WINDOW": 3, "ROTARY_BASE": 100.0},
      "global": {},
    },
  )
  assert_same_bits(
    config,
    in_stages(2, 2),
    loss=DROPPING,
    rows=random_documents,
    num_steps=1,
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  ("changes", "mesh", "optimizer", "settings"),
  [
    ({"num_layers": 4}, in_stages(4, 4), PALM_OPTIMIZER, {}),
    (
      SETTINGS["Gemma 3"],
      in_stages(4, 2),
      STACKED,
      {"rows": random_documents},
    ),
    ({}, in_stages(2, 4, stage_order="gpipe"), PALM_OPTIMIZER, {}),
    # One microbatch has gradients in bfloat16, and more have float32 sums.
    ({"activation_dtype": "bfloat16"}, in_stages(2, 1), STACKED, {}),
    ({"remat": "layer"}, in_stages(2, 2), STACKED, {}),
    (
      {"remat": "attention", "block": "serial"},
      in_stages(2, 8),
      PALM_OPTIMIZER,
      {"loss": DROPPING},
    ),
    ({}, in_stages(2, 2, "all over data and model"), PALM_OPTIMIZER, {}),
    ({}, in_stages(2, 2, "PaLM's 2D"), STACKED, {"rows": random_examples}),
    (
      {"remat": "layer"},
      in_stages(2, 1, "fully sharded"),
      PALM_OPTIMIZER,
      {"loss": DROPPING},
    ),
    (
      {"activation_dtype": "bfloat16"},
      in_stages(2, 2),
      PALM_OPTIMIZER,
      {"pods": TWO_PODS, "rows": random_documents},
    ),
    ({}, in_stages(2, 2, "PaLM's 2D"), MUON, {"pods": TWO_PODS}),
    ({}, in_stages(2, 2), ADAMW, {}),
    (
      {},
      in_stages(2, 1, "batch over data"),
      STACKED,
      {"pods": TWO_PODS, "rows": random_documents},
    ),
  ],
)
def test_stages_combine_with_all_other_settings(
  changes, mesh, optimizer, settings
):
  assert_same_bits(small_config(**changes), mesh, optimizer, **settings)


def run_step(mesh, batch, use):
  """Returns use(TrainStep) of a program with initial weights."""
  pods = PodsConfig(num_pods=2)
  config = session_config(mesh.pod_devices, 2)
  with tf.Graph().as_default(), tf.Session(config=config) as session:
    program = build_train_program(
      step_config(small_config(), mesh, loss=DROPPING, pods=pods),
      batch_size=8,
      seed=0,
      features=list(batch),
    )
    session.run(program.initialize)
    return use(TrainStep(Client(session), program))


def test_programs_of_one_client_on_different_devices_train_at_the_same_time():
  devices, config = local_devices(1, num_pods=2), small_config()
  batch = random_examples(config, 4, seed=1)
  # Two calls are begun only if both may run at once.
  both_begun = threading.Barrier(2)

  @contextlib.contextmanager
  def take_turn(*unused):
    both_begun.wait(timeout=60)
    yield

  with tf.Graph().as_default(), tf.Session(config=session_config(2)) as session:
    client, steps = Client(session), []
    for pod in devices.pods:
      program = build_train_program(
        step_config(config, in_stages(1, num_microbatches=2)),
        batch_size=4,
        seed=0,
        features=list(batch),
        devices=dataclasses.replace(devices, pods=[pod]),
      )
      session.run(program.initialize)
      steps.append(TrainStep(client, program))
    client.take_turn = take_turn
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
      first, second = threads.map(lambda step: step.run(batch, 0), steps)
  assert first == second


@pytest.mark.slow
def test_validation_losses_are_those_of_one_mesh_and_leave_nothing_behind():
  batch = random_documents(small_config(), 8, seed=1)

  def evaluate_between_steps(step):
    return [list(step.losses(batch)), step.run(batch, 0), *step.losses(batch)]

  found = run_step(in_stages(2, 2), batch, evaluate_between_steps)
  assert found == run_step(in_stages(1, 2), batch, evaluate_between_steps)
  assert len(found[0]) == 4  # two microbatches of two pods


@pytest.mark.slow
def test_a_step_that_is_not_finite_changes_no_stage():
  batch = random_documents(small_config(), 8, seed=1)
  bad = {**batch, "loss_weights": np.full_like(batch["loss_weights"], np.inf)}

  def fail_and_go_on(step):
    step.run(batch, 0)
    with pytest.raises(NonFiniteStepError) as error:
      step.run(bad, 1)
    return [error.value.losses["loss"], step.run(batch, 1)]

  found = run_step(in_stages(2, 2), batch, fail_and_go_on)
  expected = run_step(in_stages(1, 2), batch, fail_and_go_on)
  np.testing.assert_equal(found, expected)
  assert not np.isfinite(found[0])


@pytest.mark.slow
@pytest.mark.parametrize("place", ["in_process", "local_servers"])
def test_a_run_resumes_with_any_number_of_stages_in_any_place(
  corpus, tmp_path, place
):
  settings = {
    "NUM_LAYERS": 4,
    "GLOBAL_BATCH_SIZE": 8,
    "NUM_MICROBATCHES": 4,
    "CHECKPOINT_STEPS": 2,
    "EVAL_STEPS": 3,
    "PROMPTS": [],
  }
  whole, staged = tmp_path / "whole", tmp_path / "staged"
  assert runs.run("train", corpus, whole, **settings, TRAIN_STEPS=8) == 0
  for steps, stages, order in ((4, 2, "1f1b"), (6, 1, "1f1b"), (8, 4, "gpipe")):
    here = {"STAGES": stages, "STAGE_ORDER": order, "TRAIN_STEPS": steps}
    here["PODS"] = place
    runs.finish(runs.start("train", corpus, staged, **settings, **here))
  runs.assert_same_tensors(whole, staged, 8)


def test_fewer_microbatches_than_stages_are_warned_of(tmp_path, capsys):
  """And nothing else is done, because the corpus is missing."""
  settings = {"NUM_LAYERS": 4, "STAGES": 4, "NUM_MICROBATCHES": 2}
  assert runs.run("train", tmp_path / "none", tmp_path, **settings) == 2
  assert (
    "NUM_MICROBATCHES = 2 and STAGES = 4: not all stages compute at the same "
    "time; use more microbatches (a stage idles for 60% of a step)"
  ) in capsys.readouterr().err
