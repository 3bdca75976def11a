# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Pods of accelerators in stages train what pods of hosts train.

The host's steps of a whole model are the oracle: they share no stages, queues
or programs with the steps here. Virtual CPU devices take the place of TPUs.
"""

import dataclasses

import numpy as np
import pytest

from palm_mtf.executors.xla import device_store
from palm_mtf.training.step import NonFiniteStepError
from tests.blocks import SETTINGS
from tests.executors.xla.executor_test import (
  DROPOUT,
  STACKED,
  UNLIKE,
  WITH_ADAMW,
  WITH_MUON,
  check_same,
  slow,
)
from tests.executors.xla.program_run import (
  build_on_accelerators,
  run_of,
  train_on,
)
from tests.mtf_testing import (
  SINGLE,
  mesh_layout,
  random_documents,
  random_examples,
  small_config,
  train,
)

BATCH_SIZE = 8
DATA, TWO_D = mesh_layout("batch over data"), mesh_layout("PaLM's 2D")
FSDP = mesh_layout("fully sharded")
FOUR = {**UNLIKE, "num_layers": 4, "layers": "2*window, global, window"}
LOWEST = {"frozen": ["embedding", "layers/0/*"]}
TWO = {**UNLIKE, "num_layers": 2, "layers": "window, global"}


def in_stages(mesh, stages, num_microbatches, stage_order="1f1b"):
  counts = {"stages": stages, "num_microbatches": num_microbatches}
  return dataclasses.replace(mesh, stage_order=stage_order, **counts)


@pytest.mark.parametrize(
  ("mesh", "num_pods", "settings", "changes"),
  [
    (in_stages(SINGLE, 2, 2), 1, {}, {}),
    slow(in_stages(SINGLE, 2, 2), 2, DROPOUT, TWO),
    slow(in_stages(DATA, 2, 2), 2, DROPOUT, FOUR),
    slow(in_stages(FSDP, 2, 2), 1, {}, {"remat": "layer"}),
    slow(in_stages(TWO_D, 2, 2, "gpipe"), 1, STACKED, {"remat": "none"}),
    slow(in_stages(SINGLE, 4, 4), 1, STACKED, {"num_layers": 4}),
    slow(in_stages(SINGLE, 4, 8), 1, WITH_MUON, {"num_layers": 4}),
    slow(in_stages(SINGLE, 2, 4), 2, STACKED, {"block": "serial"}),
    slow(in_stages(DATA, 2, 2), 2, WITH_MUON, {"norm": "rms_norm"}),
    slow(in_stages(DATA, 2, 1), 1, WITH_ADAMW, {}),
    slow(in_stages(DATA, 2, 2), 1, DROPOUT, SETTINGS["Gemma 3"]),
    slow(in_stages(SINGLE, 2, 2), 1, {}, SETTINGS["GPT-J"]),
    slow(in_stages(SINGLE, 2, 2), 1, {"frozen": ["embedding"]}, {}),
    slow(in_stages(SINGLE, 2, 2), 2, {"frozen": ["layers/1/*"]}, {}),
    slow(in_stages(SINGLE, 2, 2), 2, LOWEST, {}),
  ],
)
def test_stages_take_the_steps_of_one_mesh_of_hosts(
  mesh, num_pods, settings, changes
):
  config = small_config(**{"num_layers": 2, **changes})
  given = {"num_steps": 3, "batch_size": BATCH_SIZE, **settings}
  is_long = "layers" in changes
  given["rows"] = random_documents if is_long else random_examples
  how = {"build": build_on_accelerators, **given}
  found = train_on(mesh, num_pods, config, **how)
  check_same(found, train(config, **given))


@pytest.mark.slow
def test_a_bad_step_changes_nothing_and_steps_keep_no_activations():
  """And the losses of a batch are those of the host."""
  config = small_config(num_layers=2)
  mesh = in_stages(mesh_layout("fully sharded", tpu="v4-8"), 2, 2)
  batch = random_examples(config, batch_size=BATCH_SIZE, seed=1)
  with run_of(config, SINGLE, features=batch.keys()) as host:
    expected = [*host.step.losses(batch)]
  with run_of(config, mesh, features=batch.keys()) as run:
    found = [*run.step.losses(batch)]
    losses, weights = zip(*found, strict=True)
    mean = np.average(losses, weights=weights)
    np.testing.assert_allclose(mean, expected[0][0], rtol=1e-6)
    before = run.variables()
    bad = {**batch, "loss_weights": np.full_like(batch["loss_weights"], np.nan)}
    with pytest.raises(NonFiniteStepError) as error:
      run.step.run(bad, 0)
    assert np.isnan(error.value.losses["loss"])
    for name, value in run.variables().items():
      np.testing.assert_array_equal(value, before[name], err_msg=name)
    assert np.isfinite(run.step.run(batch, 0)["loss"])
    name = run.program.devices.name
    stores = device_store._stores.values()
    kept = [x.values for x in stores if x.name.client == name]
    assert len(kept) == 2
    # No activation or gradient stays on devices after a step.
    assert not any(x for values in kept for x in values.values())
