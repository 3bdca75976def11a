# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs in stages, in every place, train the bits of a run without stages."""

import itertools
import json
import signal

import pytest

from tests import runs
from tests.commands.pods_test import Processes
from tests.processes import wait_until
from tests.runtime.served import Served

SETTINGS = {
  "NUM_LAYERS": 4,
  # The first two stages, or each of two, have other layers than the last.
  "LAYERS": "2*window, 2*global",
  "VARIANTS": {"window": {"ATTENTION_WINDOW": 8}, "global": {}},
  "GLOBAL_BATCH_SIZE": 8,
  "NUM_MICROBATCHES": 4,
  "TRAIN_STEPS": 60,
  "CHECKPOINT_STEPS": 20,
  "EVAL_STEPS": 20,
  "DROPOUT": 0.1,
}


def train(corpus, model_dir, **macros):
  return runs.start("train", corpus, model_dir, **SETTINGS, **macros)


def assert_same_runs(one, other):
  """With validation losses and samples too."""
  runs.assert_same_tensors(one, other, 60)
  lines = [
    [runs.without_times(line) for line in runs.read_metrics(x)]
    for x in (one, other)
  ]
  assert lines[0] == lines[1]


@pytest.fixture
def whole(corpus, tmp_path):
  """Returns the folder of a run without stages."""
  runs.finish(train(corpus, tmp_path / "whole"))
  return tmp_path / "whole"


@pytest.mark.slow
def test_a_client_that_is_killed_leaves_servers_to_the_next_client(
  corpus, whole, tmp_path
):
  with Served(2) as servers:
    staged = {"STAGES": 2, "PODS": "cluster", "ISLANDS": [servers.addresses]}
    with train(corpus, tmp_path / "staged", **staged) as killed:
      metrics = tmp_path / "staged/metrics.jsonl"
      wait_until(metrics.exists, killed)
      killed.send_signal(signal.SIGKILL)
    runs.finish(train(corpus, tmp_path / "staged", **staged))
  assert_same_runs(tmp_path / "staged", whole)


@pytest.mark.slow
def test_a_manager_gives_each_stage_an_island(corpus, whole, tmp_path):
  with Processes(tmp_path) as pods:
    for island in ("a", "a", "b", "c", "d"):
      pods.serve(f"--island={island}")
    staged = {"STAGES": 4, "PODS": "cluster", "ISLANDS": "apart"}
    staged["MANAGER"] = pods.address
    with train(corpus, tmp_path / "staged", **staged) as process:
      wait_until((tmp_path / "staged/metrics.jsonl").exists, process)
      listed = pods.list_all()
      runs.finish(process)
    used = [x["island"] for x in listed if x.get("owners")]
    assert used == [*"abcd"]
    (owner,) = (x for x in listed if "wish" in x)
    assert owner["wish"]["device_bytes"] > 10**5  # of the plan
  assert_same_runs(tmp_path / "staged", whole)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["in_process", "local_servers"])
def test_a_traced_step_shows_both_passes_on_each_stage(corpus, tmp_path, place):
  staged = {"STAGES": 2, "PODS": place, "TRACE_STEPS": [2]}
  runs.finish(train(corpus, tmp_path, **staged))
  trace = (tmp_path / "traces/step_00000002.json").read_text()
  phases = {
    (x["args"]["device"], x["cat"])
    for x in json.loads(trace)["traceEvents"]
    if "cat" in x
  }
  passes = itertools.product([0, 1], ["forward", "backward"])
  assert phases >= {*passes}
