# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The bench trains T5 on one pod and on two, with the same losses."""

import json

import numpy as np
import pytest


@pytest.mark.slow  # two processes, more than a minute
def test_it_gives_a_ratio_and_equal_losses(run_bench):
  code, out, _ = run_bench("t5_pods", "--steps=2", "--json")
  assert code == 0
  record = json.loads(out)
  assert 0 < record["low"] <= record["median"] <= record["high"]
  one, two = record["one_pod_losses"], record["two_pods_losses"]
  assert len(one) == 2 and one[1] < one[0]
  np.testing.assert_allclose(two, one, rtol=1e-5)


def test_a_wrong_number_of_steps_is_one_line(run_bench):
  code, _, said = run_bench("t5_pods", "--steps=0")
  assert code == 2
  assert said.startswith("bench t5_pods: --steps = 0: ")
