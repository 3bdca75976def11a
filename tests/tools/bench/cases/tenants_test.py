# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Clients share servers by their weights."""

import json

import pytest

from tests import processes
from tools.bench.cases import tenants


def test_programs_that_run_at_the_same_time_share_the_device_time():
  spans = [[(-1.0, 2.0), (5.0, 6.0)], [(1.0, 3.0)], []]
  # The first client has one second, half a second and one second.
  assert tenants.find_device_times(spans) == [2.5, 1.5, 0.0]


@pytest.mark.slow  # starts several processes
def test_clients_share_servers_by_their_weights():
  flags = "--clients=2", "--ms=20", "--weights=1:4", "--rounds=1", "--secs=3"
  done = processes.python("-m", "tools.bench", "tenants", *flags, "--json")
  assert done.returncode == 0, done.stderr
  rates = {
    x["kind"]: x["programs_per_sec"]
    for x in map(json.loads, done.stdout.splitlines())
  }
  assert rates["scheduled"] > 0.5 * rates["unscheduled"]
  assert 2 < rates["4 of 1:4"] / rates["1 of 1:4"] < 8
