# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What is solved of the times of small models, and that they differ enough."""

import time

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.accounting.memory import PASSES
from palm_mtf.rates.calibration import (
  PROBES,
  pace,
  pass_bytes,
  solve_secs,
  training_step,
  undisturbed_secs,
)


def traffic_of_probes(dtype):
  """Returns the bytes of each probe by kind, [probes, kinds]."""
  return np.array([pass_bytes(x.work_in(dtype)) for x in PROBES.values()])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bandwidths_of_a_made_up_machine_are_found(dtype):
  """An error of a time changes what is found by at most four times as much."""
  assert tuple(PROBES) == PASSES
  traffic = traffic_of_probes(dtype)
  true = 1 / np.array([5e9, 2e9, 3e9, 7e9])
  found = solve_secs(traffic, traffic @ true, least=1 / 40e9)
  np.testing.assert_allclose(found, true, rtol=1e-6)
  rng = np.random.default_rng(0)
  for _ in range(20):
    wrong = traffic @ true * rng.uniform(0.97, 1.03, size=4)
    found = solve_secs(traffic, wrong, least=1 / 40e9)
    np.testing.assert_allclose(found, true, rtol=0.12)


def test_no_pass_beats_the_memory():
  traffic = np.array([[4.0, 1.0], [1.0, 4.0]])
  found = solve_secs(traffic, np.array([-1.0, 9.0]), least=0.5)
  np.testing.assert_allclose(found, [0.5, (9 - 0.5) / 4])


def test_a_probe_trains_while_its_pace_is_measured():
  with (
    training_step(PROBES["weights"], "float32") as step,
    pace(tf.float32) as machine,
  ):
    start = time.perf_counter()
    secs, product_secs = machine.time_call(step)
    assert 0 < secs < time.perf_counter() - start
  assert machine.best_secs <= product_secs
  assert 1e9 < machine.flops_per_sec < 1e15


def test_what_others_take_of_products_they_take_of_a_call():
  """Of 3 s between products 1.5 times slower than at best, 1 s is others'."""
  assert undisturbed_secs(3.0, 0.15, best_secs=0.1) == pytest.approx(2.0)


def test_a_machine_that_is_faster_than_it_was_changes_no_time():
  assert undisturbed_secs(0.2, 0.9, best_secs=1.0) == 0.2
