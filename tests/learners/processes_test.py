# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Learners in processes of their own: killed, late, on hosts and on XLA."""

import pytest

from tests import processes, runs
from tests.learners.volunteers_test import Run

SETTINGS = {
  "AUDIT_SHARE": None,
  "QUORUM": 2,  # so that the run waits for the late learner
  "GRACE_SECS": 0.5,
  "POD_TIMEOUT_SECS": 10.0,
  "OUTER_STEPS": 4,
  "FRAGMENTS": 2,
  "TRAIN_STEPS": 40,
  "CHECKPOINT_STEPS": 4,
}
XLA = ("--tpu", "v4-8", "--mesh_shape", "data:4", "--layout", "batch:data")


@pytest.mark.slow
def test_learners_and_client_are_killed_and_the_run_ends(
  corpus, tmp_path, monkeypatch
):
  """One joins late, on XLA's virtual devices; a replay has the same bits."""
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  with Run(corpus, tmp_path, **SETTINGS) as run:
    record = run.folder / "merges.jsonl"

    def num_results(member):
      if not record.exists():
        return 0
      numbers = {
        x["learner"] for x in run.find("join") if x["member"] == member
      }
      results = run.find("contribution")
      return sum(x["learner"] in numbers for x in results)

    alice, bob = run.join("alice"), run.join("bob")
    processes.wait_until(lambda: num_results("bob") > 1, run.client)
    bob.kill()
    late = run.join("late", flags=XLA)
    processes.wait_until(lambda: num_results("late") > 1, run.client)
    checkpoints = run.folder / "checkpoints"
    processes.wait_until(lambda: [*checkpoints.glob("step*")], run.client)
    run.client.kill()
    run.client.wait()
    before = num_results("alice")
    run.client = run.start("train")
    error = runs.finish(run.client)
    assert "resuming from" in error
    for learner in (alice, late):
      runs.finish(learner)
    (resumed,) = run.find("resume")
    assert 0 < resumed["merges"] < run.find("merge")[-1]["merge"]
    assert num_results("alice") > 0
    assert before > 0
    done = run.find("contribution")
    tasks = {x["number"]: x["task"] for x in run.find("work")}
    assert {tasks[x["work"]] for x in done} >= {*range(40)}
    metrics = runs.read_metrics(run.folder)
    losses = [x["validation_loss"] for x in metrics if "validation_loss" in x]
    assert losses[-1] < losses[0]
    replay = run.start("train --replay")
    printed, error = replay.communicate(timeout=500)
    assert replay.returncode == 0, error
    assert printed == (
      f"merges           {run.find('merge')[-1]['merge']}, all with the "
      "recorded bits\n"
    )
