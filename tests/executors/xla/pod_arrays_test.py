# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Variables on accelerators: first values, checkpoints, checks, loops."""

import dataclasses

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.checkpoints.manifest import close_weights, open_weights
from palm_mtf.checkpoints.variables import (
  THIS_PROCESS,
  build_restorer,
  build_writer,
)
from palm_mtf.mesh.slices import names_of
from palm_mtf.programs.features import ServerFeatures
from palm_mtf.training.step import NonFiniteStepError
from palm_mtf.training.variable_checks import (
  build_fingerprints,
  build_finite_check,
)
from tests.executors.xla.program_run import BATCH_SIZE, run_of
from tests.mtf_testing import SINGLE, mesh_layout, random_examples, small_config
from tests.settings import PALM_LOSS

# The vocabulary is padded, because two devices split it.
CONFIG = small_config(vocab_size=43, remat="layer")
UNLIKE = dataclasses.replace(
  CONFIG,
  num_layers=5,
  layers="2*(window, global), global",
  variants={"window": {"ATTENTION_WINDOW": 3}, "global": {}},
)
TWO_D = mesh_layout("PaLM's 2D", tpu="v4-8")
FSDP = mesh_layout("fully sharded", tpu="v4-8")


def batch_of(seed):
  return random_examples(CONFIG, BATCH_SIZE, seed=seed)


def fingerprints(run):
  return run.fetch(
    lambda: [build_fingerprints(x) for x in run.program.pod_slices]
  )


def assert_same_bits(actual, expected):
  assert actual.keys() == expected.keys()
  for name, value in expected.items():
    assert actual[name].tobytes() == value.tobytes(), name


def test_first_weights_are_the_bits_of_the_host_path():
  with run_of(CONFIG, SINGLE) as run:
    expected = run.variables()
  with run_of(CONFIG, TWO_D) as run:
    assert_same_bits(run.variables(), expected)


@pytest.mark.slow
def test_a_step_that_is_not_finite_raises_and_changes_nothing():
  bad = batch_of(1)
  bad["loss_weights"] = np.full_like(bad["loss_weights"], np.inf)
  with run_of(CONFIG, FSDP) as run:
    run.step.run(batch_of(0), 0)
    before = run.variables()
    with pytest.raises(NonFiniteStepError) as error:
      run.step.run(bad, 1)
    assert not np.isfinite(error.value.losses["loss"])
    assert len(error.value.gradient_squares) == len(run.program.parameters)
    assert_same_bits(run.variables(), before)
    assert np.isfinite(run.step.run(batch_of(1), 1)["loss"])


@pytest.mark.slow
def test_the_loss_of_other_batches_is_that_of_the_host_path():
  mesh = dataclasses.replace(TWO_D, num_microbatches=2)
  dropout = dataclasses.replace(PALM_LOSS, dropout=0.5)
  with run_of(CONFIG, SINGLE) as run:
    (expected,) = run.step.losses(batch_of(5))
  with run_of(CONFIG, mesh, loss=dropout) as run:
    (actual,) = run.step.losses(batch_of(5))
  np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.slow
def test_a_loop_ends_at_a_step_that_is_not_finite_which_changes_nothing():
  good, bad, never = (batch_of(x) for x in range(3))
  bad["loss_weights"] = np.full_like(bad["loss_weights"], np.inf)
  with run_of(CONFIG, FSDP) as run:
    run.step.run(good, 0)
    expected = run.variables()
  with run_of(CONFIG, dataclasses.replace(FSDP, steps_per_loop=3)) as run:
    with pytest.raises(NonFiniteStepError) as error:
      run.step.run_loop([good, bad, never], 0)
    assert error.value.step == 2
    assert_same_bits(run.variables(), expected)


@pytest.mark.slow
def test_hosts_read_the_rows_that_the_client_does_not_feed():
  batch = batch_of(0)

  def rows(part, num_parts):
    return [np.split(x, num_parts)[part] for x in batch.values()]

  def read(host, batches, step, part, num_parts):
    dtypes = [tf.as_dtype(x.dtype) for x in batch.values()]
    return tf.numpy_function(rows, [part, num_parts], dtypes)

  metrics = []
  for features in ([*batch], ServerFeatures([*batch], read)):
    with run_of(CONFIG, FSDP, num_pods=2, features=features) as run:
      given = batch if isinstance(features, list) else "described"
      metrics.append(run.step.run(given, 0))
  assert metrics[0] == metrics[1]


def save(run, path):
  pods = run.program.pod_slices
  copy, write = build_writer(pods, THIS_PROCESS)
  run.session.run(copy.operations)
  run.session.run(write.outputs, {write.inputs["prefix"]: path})


def restore(run, path):
  pods = run.program.pod_slices
  restorer = build_restorer(pods, tf.constant(path), THIS_PROCESS)
  open_weights(path.encode(), [])
  run.session.run(restorer)
  close_weights(path.encode())


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, UNLIKE], ids=["like", "unlike"])
def test_checkpoints_cross_between_the_paths_bit_for_bit(
  tmp_path, monkeypatch, config
):
  # Small messages cut the stacks of layers.
  monkeypatch.setattr("palm_mtf.executors.xla.step_functions._MAX_BYTES", 500)
  of_host, of_pods = str(tmp_path / "host"), str(tmp_path / "pods")
  with run_of(config, SINGLE) as run:
    run.step.run(batch_of(0), 0)
    save(run, of_host)
    expected = run.variables()
  with run_of(config, TWO_D, num_pods=2) as run:
    restore(run, of_host)
    for pod in range(2):
      assert_same_bits(run.variables(pod), expected)
    save(run, of_pods)
    names = names_of(run.program.slices)
    np.testing.assert_array_equal(*fingerprints(run))
    assert run.fetch(lambda: build_finite_check(run.program.slices)).all()
    next_step = run.step.run(batch_of(1), 1)
  with run_of(config, SINGLE) as run:
    restore(run, of_pods)
    assert_same_bits(run.variables(), expected)
    assert sorted(names) == sorted(names_of(run.program.slices))
    on_host = run.step.run(batch_of(1), 1)
  np.testing.assert_allclose(next_step["loss"], on_host["loss"], rtol=1e-5)


@pytest.mark.slow
def test_what_is_not_finite_or_not_the_same_is_named_in_a_stack():
  name = "layer_001/mlp/wi/momentum"
  with run_of(CONFIG, TWO_D, num_pods=2) as run:
    for i, part in enumerate(run.program.slices["layer_000/mlp/wi/momentum"]):
      value = np.zeros(part.variable.shape.as_list(), np.float32)
      if i == 2:
        value[part.names.index(name)].ravel()[-1] = np.inf
      run.fetch(lambda part=part, value=value: part.variable.assign(value))
    names = names_of(run.program.slices)
    at = names.index(name)
    finite = run.fetch(lambda: build_finite_check(run.program.slices))
    assert np.flatnonzero(~finite).tolist() == [at]
    first, second = fingerprints(run)
    assert np.flatnonzero(first != second).tolist() == [at]
