# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The bench trains T5 on the runtime and in a session, with equal losses."""

import json

import pytest


@pytest.mark.slow  # compiles two training steps
def test_steps_have_equal_losses_and_calls_a_cost(run_bench):
  code, out, _ = run_bench("runtime", "--steps=2", "--calls=50", "--json")
  assert code == 0
  t5, calls = (json.loads(x) for x in out.splitlines())
  assert t5["are_losses_equal"]
  assert t5["losses"][1] < t5["losses"][0]
  assert 0 < t5["low"] <= t5["ratio"] <= t5["high"]
  assert calls["client_secs"] > 0 < calls["callable_secs"]


def test_a_wrong_number_of_steps_is_one_line(run_bench):
  code, _, said = run_bench("runtime", "--steps=0")
  assert code == 2
  assert said.startswith("bench runtime: --steps = 0: ")
