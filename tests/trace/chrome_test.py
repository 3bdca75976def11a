# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The file is what chrome://tracing reads: nothing in a row overlaps."""

import collections
import itertools
import json

import pytest

from palm_mtf.trace.chrome import chrome_trace
from palm_mtf.trace.records import Operation, Trace, Transfer

TRACE = Trace(
  num_pods=2,
  last_call=0.004,
  operations=[
    Operation(0, 0, "a", "forward", 0.000, 0.005),
    Operation(0, 1, "b", "backward", 0.001, 0.002),
    Operation(0, 1, "c", "update", 0.002, 0.006),
    Operation(0, 0, "too short", "forward", 0.001, 0.0010009),
    Operation(1, 0, "d", "exchange", 0.003, 0.004),
  ],
  transfers=[
    Transfer("embedding", 0, 1, 4096, 0.001, 0.002, 0.005),
    Transfer("norm", 0, 1, 64, 0.002, 0.002, 0.003),
  ],
  end=0.006,
)


@pytest.fixture(scope="module")
def written():
  return json.loads(json.dumps(chrome_trace(TRACE, 20)))


def events(written, name):
  (pid,) = (
    x["pid"]
    for x in written["traceEvents"]
    if x["name"] == "process_name" and x["args"]["name"] == name
  )
  return [
    x for x in written["traceEvents"] if x["ph"] == "X" and x["pid"] == pid
  ]


def test_each_pod_and_each_way_has_a_process(written):
  assert [x["name"] for x in events(written, "pod 0")] == ["a", "b", "c"]
  assert [x["cat"] for x in events(written, "pod 1")] == ["exchange"]
  assert len(events(written, "pod 0 -> pod 1")) == 2
  names = [x for x in written["traceEvents"] if x["name"] == "process_name"]
  assert len(names) == 3  # nothing went from pod 1 to pod 0


def test_what_runs_at_once_has_rows_of_its_own(written):
  rows = collections.defaultdict(list)
  for x in written["traceEvents"]:
    if x["ph"] == "X":
      rows[x["pid"], x["tid"]].append((x["ts"], x["ts"] + x["dur"]))
  for spans in rows.values():
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
  assert [x["tid"] for x in events(written, "pod 0")] == [0, 1, 1]


def test_a_transfer_lasts_from_ready_to_arrived_and_has_its_bytes(written):
  first, _ = events(written, "pod 0 -> pod 1")
  assert (first["name"], first["ts"], first["dur"]) == ("embedding", 1e3, 4e3)
  assert first["args"] == {"bytes": 4096, "usecs until sent": 1e3}


def test_the_numbers_of_step_and_way_stand_beside_the_events(written):
  other = written["otherData"]
  assert (other["step"], other["num_pods"]) == (20, 2)
  assert other["last_call"] == 4e3
  assert other["figures"]["traced_dcn_bytes"] == 4160
  (way,) = other["directions"]
  assert (way["source"], way["target"], way["bytes"]) == (0, 1, 4160)
  assert (way["hidden_usecs"], way["exposed_usecs"]) == (1e3, 3e3)
  assert way["exposed"] == [[1e3, 3e3], [4e3, 5e3]]
