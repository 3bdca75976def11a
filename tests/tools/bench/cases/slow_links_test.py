# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Times and bytes per step are those of the points that a run passes."""

import json

import pytest

from tests import processes
from tools.bench.cases import slow_links


def test_a_record_has_bytes_and_seconds_per_step_and_times_to_losses():
  """Steps of 1 s, of which every second one has a sync that takes 1 s more."""
  losses, points = {2: 4.5, 4: 4.1}, [(100.0, 5000, {"step": 3})]
  for i in range(1, 7):
    secs = 1 + (i % 3 == 0)
    now, passed, _ = points[-1]
    line = {"step": 3 + i, "step_secs": secs}
    if i in losses:
      line["validation_loss"] = losses[i]
    points.append((now + secs, passed + 100 * (i % 3 == 0), line))
  record = slow_links.summarize("diloco", points, [5.0, 4.2, 4.0])
  assert record["bytes_per_step"] == pytest.approx(200 / 6)
  assert record["step_secs"] == pytest.approx(8 / 6)
  assert record["median_step_secs"] == 1
  assert record["extra_secs"] == 2  # two syncs
  assert record["secs_to_loss"] == {"5": 2.0, "4.2": 5.0, "4": None}
  assert (record["steps"], record["validation_loss"]) == (9, 4.1)


@pytest.mark.slow
def test_pods_that_exchange_seldom_send_a_twentieth_of_the_bytes():
  done = processes.python(
    *[processes.ROOT / "tools" / "bench", "slow_links", "--mbits=1000"],
    *["--forms=gradients,diloco", "--delay_ms=1", "--steps=40", "--json"],
  )
  lacks = ("install iproute2", "takes the rights of root")
  if any(x in done.stderr for x in lacks):
    pytest.skip(done.stderr)
  assert done.returncode == 0, done.stderr
  gradients, diloco = map(json.loads, done.stdout.splitlines())
  # 1,475,200 float32 numbers of the quickstart, in both directions.
  expected = 2 * 4 * 1_475_200
  assert 1 < gradients["bytes_per_step"] / expected < 1.05
  assert 20 * diloco["bytes_per_step"] < gradients["bytes_per_step"]
