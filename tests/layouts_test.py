# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Meshes of every shape train as one device does, and repeat to the bit."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from palm_mtf.config import MeshLayout, PodsConfig
from tests.mtf_testing import (
  PALM_OPTIMIZER,
  SINGLE,
  random_documents,
  relative_error,
  small_config,
  train,
)

pytestmark = pytest.mark.slow

STORED = "d_model_stored:data"
WORK = "heads:model,d_ff:model,vocab:model"
RESIDUAL = "d_model_residual:model"
# A vocabulary of 42 needs padding if the axis `model` has 4 or 8 devices.
CONFIG = small_config(num_layers=1, num_heads=8, d_ff=40, vocab_size=42)
NUM_STEPS, BATCH_SIZE = 10, 32
# This bound clips every gradient, so that a wrong norm has an effect.
OPTIMIZER = dataclasses.replace(PALM_OPTIMIZER, gradient_clip=0.1)

# (MESH_SHAPE, REMAT, microbatches, pods)
FEW = [
  ("data:2,model:2", "layer", 2, 1),
  ("data:2", "attention", 2, 2),
  ("model:4", "none", 1, 1),
]
EIGHT = ("data:8", "data:4,model:2", "data:2,model:4", "model:8")
WIDE = list(
  itertools.product(EIGHT, ("none", "attention", "layer"), (1, 2), (1, 2))
)


def layout_of(shape):
  """Returns all layout rules that are possible with the axes of a mesh."""
  rules = []
  if "data" in shape:
    rules += ["batch:data", STORED]
  if "model" in shape:
    rules += [WORK, RESIDUAL]
  return ",".join(rules)


def train_model(mesh=SINGLE, remat="none", num_pods=1):
  """Returns every variable and the metrics of all steps."""
  return train(
    dataclasses.replace(CONFIG, remat=remat),
    OPTIMIZER,
    rows=random_documents,
    mesh=mesh,
    seed=3,
    num_steps=NUM_STEPS,
    batch_size=BATCH_SIZE,
    pods=PodsConfig(num_pods=num_pods),
  )


@functools.cache
def train_split(shape, remat, num_microbatches, num_pods):
  """Returns what `train_model` returns, for a mesh of several devices."""
  mesh = MeshLayout(
    mesh_shape=shape, layout=layout_of(shape), num_microbatches=num_microbatches
  )
  return train_model(mesh, remat, num_pods)


@pytest.fixture(scope="module")
def single():
  return train_model()


# `train` compares the copies on all devices, and the pods, to the bit.
@pytest.mark.parametrize("case", [*FEW, *WIDE], ids=str)
def test_ten_steps_are_those_of_one_device(case, single):
  variables, metrics = train_split(*case)
  expected, expected_metrics = single
  for seen, one in zip(metrics, expected_metrics, strict=True):
    assert seen == pytest.approx(one, rel=1e-5)
  assert variables.keys() == expected.keys()
  for name, value in expected.items():
    # Each step's g / sqrt(v) amplifies float32 rounding.
    assert relative_error(variables[name], value) < 1e-3, name


@pytest.mark.parametrize("case", [FEW[0], *WIDE[1::4]], ids=str)
def test_a_layout_gives_the_same_bits_twice(case):
  first, first_metrics = train_split(*case)
  second, second_metrics = train_split.__wrapped__(*case)
  assert first_metrics == second_metrics
  for name, value in first.items():
    np.testing.assert_array_equal(second[name], value, err_msg=name)
