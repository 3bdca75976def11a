# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""XLA's program of a pod computes what the host path computes.

XLA runs the very program that a TPU would run, with its own collectives, on
virtual CPU devices.
"""

import dataclasses
import functools

import numpy as np
import pytest

from palm_mtf.config import MeshLayout
from tests.blocks import SETTINGS, block_config
from tests.cases import slow
from tests.executors.xla.program_run import build_on_accelerators, train_on
from tests.mtf_testing import (
  PALM_OPTIMIZER,
  SINGLE,
  mesh_layout,
  random_documents,
  random_examples,
  small_config,
  train,
)
from tests.settings import ADAMW, MUON, PALM_LOSS

BATCH_SIZE = 8
# Float32 sums in another order differ in the last bits, and 20 steps of
# Adafactor, which divides by root mean squares, multiply the difference.
TOLERANCE = 2e-4
# Groups with a period of three layers and of one.
UNLIKE = {**SETTINGS["Cohere 2"], "layers": "2*(2*window, global), window"}
UNLIKE["num_layers"] = 7
PLAIN = {}
DROPOUT = {"loss": dataclasses.replace(PALM_LOSS, dropout=0.25)}
STACKED = {
  "optimizer": dataclasses.replace(
    PALM_OPTIMIZER, parameter_scale="stacked", second_moment="factored"
  )
}
WITH_ADAMW, WITH_MUON = {"optimizer": ADAMW}, {"optimizer": MUON}
# Layout files for TPUs and their rules, on as many devices as there are here.
TWO_D = mesh_layout("PaLM's 2D")  # tpu_palm_540b.gin, tpu_palm_62b.gin
FSDP = mesh_layout("fully sharded")  # tpu_v4_8.gin, tpu_v3_8.gin
EIGHT = MeshLayout(
  mesh_shape="data:4,model:2",
  layout="batch:data,heads:model,d_ff:model,vocab:model,d_model_stored:data",
)  # tpu_v4_128.gin
BY_EXPERTS = MeshLayout(
  mesh_shape="data:2,model:2", layout="batch:data,heads:model,experts:model"
)


@functools.cache
def train_on_host(config, num_steps, *settings):
  how = {"num_steps": num_steps, "batch_size": BATCH_SIZE, **dict(settings)}
  return train(config, rows=random_examples, **how)


def train_here(
  config, mesh, num_pods=1, num_steps=20, rows=random_examples, **settings
):
  how = {"rows": rows, "num_steps": num_steps, **settings}
  how["build"] = build_on_accelerators
  return train_on(mesh, num_pods, config, **how)


@pytest.mark.parametrize(
  ("mesh", "num_microbatches", "num_pods", "settings", "changes"),
  [
    (TWO_D, 2, 1, DROPOUT | WITH_MUON, {"remat": "layer", "num_layers": 1}),
    slow(TWO_D, 2, 2, {**DROPOUT, **WITH_MUON}, {"remat": "layer"}),
    slow(TWO_D, 2, 2, DROPOUT, {"remat": "layer"}),
    slow(FSDP, 1, 1, WITH_MUON, {"remat": "none"}),
    slow(BY_EXPERTS, 2, 1, WITH_MUON, SETTINGS["Mixtral"]),
    slow(EIGHT, 2, 1, WITH_ADAMW, {"remat": "none"}),
    slow(EIGHT, 1, 1, STACKED, {"remat": "attention"}),
    slow(FSDP, 1, 1, PLAIN, {"remat": "none"}),
    slow(FSDP, 1, 2, STACKED, {"remat": "layer", "num_layers": 1}),
    slow(TWO_D, 1, 2, STACKED, {"remat": "none", "block": "serial"}),
    slow(TWO_D, 4, 1, DROPOUT, {"norm": "rms_norm"}),
    slow(EIGHT, 2, 1, DROPOUT, {"attention": "multi_head"}),
    slow(SINGLE, 2, 1, DROPOUT, {"remat": "layer"}),
    slow(TWO_D, 2, 2, DROPOUT, {**UNLIKE, "remat": "layer"}),
    slow(EIGHT, 1, 1, STACKED, {**UNLIKE, "block": "serial"}),
  ],
)
def test_twenty_steps_are_those_of_the_host_path(
  mesh, num_microbatches, num_pods, settings, changes
):
  config = small_config(**changes)
  mesh = dataclasses.replace(mesh, num_microbatches=num_microbatches)
  # `train` compares the bits of all pods after each step.
  found = train_here(config, mesh, num_pods, **settings)
  check_same(found, train_on_host(config, 20, *settings.items()))


def check_same(here, host):
  """Compares the results of two calls of `train`."""
  (variables, metrics), (expected, host_metrics) = here, host
  for found, of_host in zip(metrics, host_metrics, strict=True):
    assert found.keys() == of_host.keys()
    for name, value in of_host.items():
      np.testing.assert_allclose(found[name], value, TOLERANCE, err_msg=name)
  assert variables.keys() == expected.keys()
  for name, value in expected.items():
    scale = np.abs(value).max()
    error = np.abs(variables[name] - value).max()
    assert error <= TOLERANCE * scale, (name, error / scale)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [TWO_D, FSDP], ids=["2D", "fully sharded"])
@pytest.mark.parametrize("name", SETTINGS)
def test_steps_of_other_blocks_are_those_of_the_host_path(name, mesh):
  """Adafactor divides a gradient that is only rounding, as of k's bias, by its
  own size. So the losses and norms of gradients are compared, not variables.
  """
  config = block_config(name, remat="layer")
  how = dict(num_steps=3, rows=random_documents)
  _, metrics = train_here(config, mesh, **how)
  _, on_host = train(config, PALM_OPTIMIZER, batch_size=BATCH_SIZE, **how)
  for found, of_host in zip(metrics, on_host, strict=True):
    terms = {"loss", "z_loss", "grad_norm", "expert_load"} & of_host.keys()
    for term in terms:
      one, other = found[term], of_host[term]
      np.testing.assert_allclose(one, other, TOLERANCE, err_msg=term)
