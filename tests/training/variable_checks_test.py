# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Variables that are not finite, or not the same on all pods, stop a run."""

import shutil
import types

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.checkpoints.manifest import find_checkpoints
from palm_mtf.checkpoints.writer import write_checkpoint
from palm_mtf.config import ExchangeConfig
from palm_mtf.errors import UserError
from palm_mtf.mesh.session import session_config
from palm_mtf.mesh.slices import Slice
from palm_mtf.programs.train_program import build_train_program
from palm_mtf.runtime.client.client import Client
from palm_mtf.training.step import NonFiniteStepError, TrainStep
from palm_mtf.training.variable_checks import VariableChecks, build_fingerprints
from tests import runs
from tests.cases import slow
from tests.checkpoint_files import save_tensors
from tests.mtf_testing import (
  feed_of,
  load_parameters,
  mesh_layout,
  random_tokens,
  small_config,
)
from tests.oracle import random_parameters
from tests.programs.outer_test import NAMES, ToyPods
from tests.refusals import message_of
from tests.settings import step_config


def plant(model_dir, name, place, value):
  """Rewrites the checkpoint of step 12 with `value` at a place of a tensor."""
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
    slow(
      ("layer_000/mlp/wi_gate", (0, 0), np.inf),
      "is the parameter layer_000/mlp/wi_gate, before the step.",
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
  """The loss and the gradients of the step are finite."""
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


CONFIG = small_config(num_layers=1)


@pytest.fixture(scope="module")
def diverging():
  """A session, a program of two devices, and its checks."""
  mesh = mesh_layout("vocab over model")
  with (
    tf.Graph().as_default(),
    tf.Session(config=session_config(mesh.num_devices)) as session,
  ):
    program = build_train_program(
      step_config(CONFIG, mesh), batch_size=4, seed=0
    )
    session.run(program.initialize)
    watch = VariableChecks(Client(session), program, lambda: None)
    yield session, program, watch


@pytest.mark.parametrize(
  ("name", "number", "message"),
  [
    ("layer_000/norm/scale", np.nan, "parameter layer_000/norm/scale, before"),
    # Squares of logits overflow.
    ("final_norm/scale", 1e25, "is the z_loss, of parameters that all are."),
  ],
)
def test_a_bad_step_changes_no_bit_of_any_variable(
  name, number, message, diverging
):
  session, program, watch = diverging
  batch = random_tokens(CONFIG, batch_size=4, seed=0)
  params = random_parameters(CONFIG, seed=1)
  load_parameters(session, program.slices, params)
  train_step = TrainStep(Client(session), program)
  metrics = train_step.run(batch, 0)
  losses, squares, is_finite = session.run(
    program.measure.outputs, feed_of(program, batch, 1)
  )
  assert is_finite
  assert np.sqrt(squares.sum()) == pytest.approx(losses["grad_norm"])
  assert losses.keys() < metrics.keys()

  params[name][:] = number
  load_parameters(session, program.slices, params)
  before = all_values(session, program)
  with pytest.raises(NonFiniteStepError) as bad:
    train_step.run(batch, 1)
  runs.assert_same(before, all_values(session, program))
  assert message in str(watch.make_step_error(bad.value))


def test_the_gradient_that_was_computed_first_is_named(diverging):
  session, program, watch = diverging
  session.run(program.initialize)
  losses = {"loss": 5.0, "z_loss": 0.1, "grad_norm": np.inf}
  squares = np.ones(len(program.parameters))
  squares[program.parameters.index("layer_000/attention/o")] = np.nan
  squares[program.parameters.index("final_norm/scale")] = np.inf
  error = watch.make_step_error(NonFiniteStepError(7, losses, squares))
  assert str(error) == (
    "loss = 5.0, z_loss = 0.1, grad_norm = inf at step 7: training has "
    "diverged; the first tensor that is not finite is the gradient of "
    "final_norm/scale. This step is not saved; lower LEARNING_RATE. There is "
    "no checkpoint yet."
  )


def test_a_parameter_that_differs_between_pods_is_named_with_its_pod():
  """A pod's own parameter may be infinite long before the next sync."""
  first, name = np.ones([len(NAMES), 3], np.float32), "layer_000/w"
  pods = ToyPods(2, first, ExchangeConfig(exchange="diloco"))
  program = types.SimpleNamespace(parameters=NAMES)
  given = pods.client, program, lambda: None, pods.outer
  watch = VariableChecks(*given)
  update = np.zeros([1, 2, *first.shape], np.float32)
  update[0, 1, NAMES.index(name)] = np.inf
  pods.train(update)
  bad = NonFiniteStepError(2, {"loss": np.nan}, np.ones(len(NAMES)))
  expected = f"is not finite is the parameter pods/1/{name}, before the step. "
  assert expected in str(watch.make_step_error(bad))


def slice_of(value, device, name="a"):
  """Returns a slice that is a whole variable of a CPU device."""
  with tf.device(f"/device:cpu:{device}"):
    variable = tf.Variable(value, use_resource=True)
  return Slice(
    begin=[0] * value.ndim,
    sizes=list(value.shape),
    spec="",
    is_first=True,
    saved_dtype=variable.dtype,
    names=[name],
    variable=variable,
    near=variable.device,
  )


def flip_bit(session, pod, name):
  """Changes the last bit of one number of the last device's slice."""
  variable = pod[name][-1].variable
  value = session.run(variable.read_value())
  value.view(np.uint32).ravel()[-1] ^= 1
  variable.load(value, session)


@pytest.mark.parametrize(
  ("num_pods", "who"), [(2, "pods 0 and 1"), (3, "pod 1 as on all others")]
)
def test_a_planted_change_is_named_and_is_gone_when_taken_back(num_pods, who):
  """Each pod has two variables on two devices."""
  config = session_config(2, num_pods)
  with tf.Graph().as_default(), tf.Session(config=config) as session:
    pods = [
      {
        name: [slice_of(np.float32([1, i]), 2 * pod + i, name) for i in (0, 1)]
        for name in ("embedding", "final_norm/scale")
      }
      for pod in range(num_pods)
    ]
    program = types.SimpleNamespace(
      parameters=list(pods[0]), slices=pods[0], pod_slices=pods
    )
    session.run(tf.global_variables_initializer())
    watch = VariableChecks(Client(session), program, lambda: None)
    assert "_fingerprints" not in vars(watch), "no first step waits"
    watch.check_replicas(0)
    flip_bit(session, pods[1], "embedding")
    assert message_of(watch.check_replicas, 7) == (
      f"embedding is not the same on {who} after step 7: a pod's memory, "
      "network or processor is at fault. This step is not saved; continue "
      "without that pod's machine. There is no checkpoint yet."
    )
    flip_bit(session, pods[1], "final_norm/scale")
    with pytest.raises(UserError, match="as are 1 other variables"):
      watch.check_replicas(8)
    flip_bit(session, pods[1], "final_norm/scale")
    flip_bit(session, pods[1], "embedding")
    watch.check_replicas(9)


def test_a_run_stops_at_the_next_comparison_and_saves_nothing(
  corpus, tmp_path, capsys, monkeypatch
):
  made = TrainStep.__init__
  run = TrainStep.run

  def remember(self, client, program):
    self.planted_in = client._session, program.pod_slices[1]
    made(self, client, program)

  def run_and_plant(self, batch, step, records):
    result = run(self, batch, step, records)
    if step == 4:
      with self.planted_in[0].graph.as_default():
        flip_bit(*self.planted_in, "embedding")
    return result

  monkeypatch.setattr(TrainStep, "__init__", remember)
  monkeypatch.setattr(TrainStep, "run", run_and_plant)
  macros = {"NUM_PODS": 2, "FINGERPRINT_STEPS": 3, "EVAL_STEPS": 12}
  macros["PROMPTS"] = []
  assert runs.run("train", corpus, tmp_path, **macros) == 2
  error = capsys.readouterr().err.splitlines()[-1]
  assert "is not the same on pods 0 and 1 after step 6" in error
  assert error.endswith("checkpoints/step_00000004.")
  found = [path.name for path in (tmp_path / "checkpoints").iterdir()]
  assert found == ["step_00000004"]


def fingerprints(*variables):
  """Returns the fingerprint of each variable, a list of slices."""
  with tf.Graph().as_default(), tf.Session(config=session_config(2)) as session:
    result = build_fingerprints(
      {
        str(number): [slice_of(part, i) for i, part in enumerate(parts)]
        for number, parts in enumerate(variables)
      }
    )
    session.run(tf.global_variables_initializer())
    return session.run(result)


def test_any_flipped_bit_and_any_swap_is_detected():
  x = np.random.default_rng(1).normal(size=[4, 7]).astype(np.float32)
  changed = []
  for bit in range(32):
    y = x.copy()
    y.view(np.uint32)[bit % 4, bit % 7] ^= np.uint32(1 << bit)
    changed.append([y])
  zero = x.copy()
  zero[2, 2] = 0.0
  minus = zero.copy()
  minus[2, 2] = -0.0
  others = [[x[::-1].copy()], [x[:2], x[2:]], [x[2:], x[:2]], [zero], [minus]]
  numbers = fingerprints([x], [x.copy()], *changed, *others)
  assert numbers[0] == numbers[1]
  assert len(set(numbers[1:].tolist())) == len(numbers) - 1
