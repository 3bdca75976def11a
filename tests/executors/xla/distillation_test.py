# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A teacher trains the same numbers wherever steps run."""

import functools

import pytest

from tests import oracle
from tests.cases import slow
from tests.executors.xla.frozen_test import MESHES
from tests.executors.xla.program_run import train_on
from tests.model.distillation_test import loss_config, random_batch
from tests.mtf_testing import relative_error, small_config


@functools.cache
def run_steps(kind, mesh, num_pods=1):
  config, layout = small_config(num_layers=2), MESHES[mesh]
  params, teacher = (oracle.random_parameters(config, seed=x) for x in (7, 8))
  loss = loss_config(kind)

  def rows(config, batch_size, seed):
    return random_batch(config, teacher, loss, layout, seed, batch_size)

  how = {"rows": rows, "params": params, "loss": loss, "num_steps": 3}
  return train_on(layout, num_pods, config, **how)


@pytest.mark.parametrize(
  ("kind", "mesh", "num_pods"),
  [
    slow(kind, mesh, num_pods)
    for kind in ("full", "top", "sampled")
    for mesh in MESHES
    for num_pods in (1, 2)
    if kind == "top" or num_pods == 1
  ],
)
def test_layouts_pods_and_stages_train_the_same(kind, mesh, num_pods):
  expected, numbers = run_steps(kind, "hosts")
  found, metrics = run_steps(kind, mesh, num_pods)
  for name, value in found.items():
    assert relative_error(value, expected[name]) < 1e-3, name
  for one, other in zip(numbers, metrics, strict=True):
    for name in ("loss", "z_loss", "teacher_loss", "grad_norm"):
      assert other[name] == pytest.approx(one[name], rel=1e-4), name
