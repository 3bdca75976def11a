# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The bench trains by the host path and by XLA, with the same losses."""

import json

import numpy as np
import pytest


@pytest.mark.slow  # two processes, half a minute
def test_it_gives_a_ratio_and_equal_losses(run_bench):
  code, out, _ = run_bench(
    *("accelerators", "--size=4.8M", "--dtype=float32", "--rounds=2", "--json")
  )
  assert code == 0
  record = json.loads(out)
  assert 0 < record["low"] <= record["median"] <= record["high"]
  host, xla = record["host_losses"], record["xla_losses"]
  assert len(host) == 2 and host[1] < host[0]
  np.testing.assert_allclose(xla, host, rtol=1e-4)


def test_a_wrong_number_of_rounds_is_one_line(run_bench):
  code, _, said = run_bench("accelerators", "--rounds=0")
  assert code == 2
  assert said.startswith("bench accelerators: --rounds = 0: ")
