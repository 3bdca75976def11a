# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs of `palm_mtf train` with LEARNERS; the learners are threads here."""

import contextlib
import io
import json
import shutil

import pytest

from palm_mtf.cli.main import main
from palm_mtf.learners import run as learners_run
from palm_mtf.learners.members import add_member
from tests import runs
from tests.learners.learner_runs import Member

SETTINGS = {
  "LEARNERS": "127.0.0.1:0",
  "EXCHANGE": "diloco",
  "OUTER_STEPS": 2,
  "NUM_PODS": 2,
  "NUM_LAYERS": 2,
  "GLOBAL_BATCH_SIZE": 8,
  "GRACE_SECS": 0.2,
  "TRAIN_STEPS": 12,
  "CHECKPOINT_STEPS": 4,
}


@pytest.fixture(name="train")
def train_with(monkeypatch, corpus, tmp_path):
  """Returns a function that trains with members; the run's folder is tmp."""

  def train(members, folder=tmp_path, **macros):
    @contextlib.contextmanager
    def serve(config, handler):
      threads = [
        Member(handler, name, **x).start() for name, x in members.items()
      ]
      yield 0
      for thread in threads:
        thread.join()

    add_member(
      str(folder.with_suffix(".learners")), f"a/{len([*folder.rglob('*')])}"
    )
    macros["LEARNER_TOKENS"] = str(folder.with_suffix(".learners"))
    monkeypatch.setattr(learners_run, "serve_learners", serve)
    return runs.run("train", corpus, folder, **(SETTINGS | macros))

  return train


def read_record(folder):
  """Returns the events of a run's record."""
  lines = (folder / "merges.jsonl").read_text().splitlines()
  return [json.loads(x) for x in lines]


def events_of(folder, kind):
  """Returns the events of one kind."""
  return [x for x in read_record(folder) if x["event"] == kind]


def check_replay(corpus, folder, **macros):
  """A replay in this process has the bits of each merge, and of the end."""
  macros["LEARNER_TOKENS"] = str(folder.with_suffix(".learners"))
  given = runs.arguments("train --replay", corpus, folder, **macros)
  with contextlib.redirect_stdout(io.StringIO()) as printed:
    assert main(given) == 0
  merges = events_of(folder, "merge")
  assert printed.getvalue() == (
    f"merges           {merges[-1]['merge']}, all with the recorded bits\n"
  )


@pytest.mark.slow
def test_learners_of_any_kind_come_and_go_and_a_replay_has_their_bits(
  train, corpus, tmp_path, monkeypatch
):
  """A slow one, one that is killed, and one on XLA that joins later."""
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  xla = {"TPU": "v4-8", "MESH_SHAPE": "data:4", "LAYOUT": "batch:data"}
  macros = {"TRAIN_STEPS": 24, "POD_TIMEOUT_SECS": 5.0, "FRAGMENTS": 2}
  macros |= {"OUTER_STEPS": 4, "QUORUM": 1}
  members = {
    "slow": {"secs": 0.5},
    "killed": {"num_works": 4},
    "late": {"mesh": xla, "after": 3},
  }
  assert train(members, **macros) == 0
  numbers = {x["member"]: x["learner"] for x in events_of(tmp_path, "join")}
  assert {x["learner"] for x in events_of(tmp_path, "leave")} >= {
    numbers["killed"]
  }
  done = [x["learner"] for x in events_of(tmp_path, "contribution")]
  assert done.count(numbers["killed"]) == 4
  assert done.count(numbers["late"]) > 2
  metrics = runs.read_metrics(tmp_path)
  losses = [x["validation_loss"] for x in metrics if "validation_loss" in x]
  assert losses[-1] < losses[0] - 0.3
  assert metrics[-1]["tokens"] == 24 * 8 * 32
  assert metrics[-1]["lag/slow"] < 4
  check_replay(corpus, tmp_path, **(SETTINGS | macros))


@pytest.mark.slow
def test_a_client_that_is_stopped_resumes_with_its_momentum(
  train, corpus, tmp_path
):
  """The learners begin again with the outer parameters; so does a replay."""
  macros = {"TRAIN_STEPS": 6, "CHECKPOINT_STEPS": 2}
  members = {"a": {}, "b": {}}
  assert train(members, **macros) == 0
  before = runs.read_tensors(tmp_path, 6)
  momentum = [x for x in before if x.endswith("/outer_momentum")]
  assert len(momentum) == len(before) / 2
  assert all(before[x].any() for x in momentum)
  # As if it had been killed after step 4.
  shutil.rmtree(tmp_path / "checkpoints/step_00000006")
  assert train(members, **macros | {"TRAIN_STEPS": 10}) == 0
  (resumed,) = events_of(tmp_path, "resume")
  assert resumed["merges"] == 2
  merges = [x["merge"] for x in events_of(tmp_path, "merge")]
  assert merges == [*range(1, 6)]
  work = events_of(tmp_path, "work")
  assert [x["begins"] for x in work].count(True) == 4
  check_replay(corpus, tmp_path, **(SETTINGS | macros | {"TRAIN_STEPS": 10}))
