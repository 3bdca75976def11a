# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs that XLA compiles for H100s, against the plan's closed forms.

Needs no GPU, but: pip install 'palm_mtf[compile_gpu]'.
"""

import json

import pytest

from palm_mtf.compilation.described_gpus import describe_hosts
from tests import processes
from tests.settings import hardware_of


@pytest.fixture(scope="module")
def plan():
  """Returns the record of a plan, with "compiled"."""
  pytest.importorskip("jax_cuda12_plugin")
  # In a separate process, because JAX looks for plugins once per process, and
  # the plugin refuses to load unless JAX_PLATFORMS is "cpu" or CUDA is there.
  done = processes.python(
    *("-m", "palm_mtf", "plan", "--compile", "--json"),
    *("--gin_file=recipes/quickstart.gin", "--gin_file=layouts/palm_2d.gin"),
    *("--gin.CHIP='h100_sxm'", "--gin.NUM_PODS=1"),
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


def moved(record):
  return {(x["kind"], *x["axes"]): x["bytes"] for x in record["moved"]}


def test_a_host_has_the_gpus_of_one_switch():
  rates = hardware_of("h100_sxm")
  found = {n: describe_hosts(n, rates) for n in (1, 6, 8, 12, 64)}
  assert found == {1: "1x1x1", 6: "1x1x6", 8: "1x1x8", 12: "1x3x4", 64: "1x8x8"}


@pytest.mark.slow
def test_activations_and_weights_move_with_the_bytes_of_the_plan(plan):
  planned, found = moved(plan), moved(plan["compiled"])
  for key in (
    ("all_gather", "data"),
    ("all_gather", "model"),
    ("reduce_scatter", "model"),
    ("all_reduce", "model"),
  ):
    assert found[key] == pytest.approx(planned[key], rel=0.001), key


@pytest.mark.slow
def test_gradients_are_reduce_scattered_with_the_bytes_of_the_plan(plan):
  scatters = ("reduce_scatter", "data")
  planned = moved(plan)[scatters]
  # XLA adds up the embedding's gradients of both uses, and scatters the sum.
  of_embedding = 1 / 2 * 4096 / 2 * 128 * 2
  assert moved(plan["compiled"])[scatters] == planned - of_embedding


@pytest.mark.slow
def test_groups_are_those_of_the_mesh(plan):
  assert {
    (*x["axes"], x["groups"], x["group_devices"])
    for x in plan["compiled"]["moved"]
  } == {("data", 2, 2), ("model", 2, 2), ("data", "model", 1, 4)}


@pytest.mark.slow
def test_the_peak_is_that_of_the_plan(plan):
  (step,) = plan["compiled"]["programs"]
  planned = plan["device_bytes"]
  kept = planned["weights"] + planned["slots"]
  assert step["argument_bytes"] >= kept
  # The plan knows neither layouts of arrays nor when XLA frees each.
  assert step["peak_bytes"] == pytest.approx(sum(planned.values()), rel=0.1)
