# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Clients share servers by their weights, and the bench draws who ran when."""

import json

import pytest

from tests import processes
from tools.bench.cases import tenants


def record(figure, kind, clients, **more):
  return {
    "figure": figure,
    "ms": 2,
    "clients": clients,
    "kind": kind,
    "programs_per_sec": 10.0,
    "ratio": 1.0,
    **more,
  }


def test_throughput_and_traces_are_drawn(tmp_path):
  records = [
    record(8, kind, clients)
    for clients in (1, 4)
    for kind in ("scheduled", "unscheduled")
  ] + [
    record(9, f"{x} of 1:2", 2, spans=[[0.0, 0.1 * x], [0.2, 0.3]])
    for x in (1, 2)
  ]
  tenants.draw(records, str(tmp_path / "picture.png"))
  assert (tmp_path / "picture.png").stat().st_size > 10_000
  cells = ["2", "1", "scheduled", "10.0", "1.000"]
  assert tenants.row(records[0]).split() == cells


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
