# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs of `palm_mtf train` with LEARNERS, which are threads or processes."""

import contextlib
import dataclasses
import io
import json
import shutil

import numpy as np
import pytest

from palm_mtf.cli.main import main
from palm_mtf.commands import train as train_command
from palm_mtf.config import LearnersConfig
from palm_mtf.config.learners import check_learners
from palm_mtf.errors import UserError
from palm_mtf.learners import run as learners_run
from palm_mtf.learners.members import add_member
from tests import processes, runs
from tests.config.checked_test import RUN
from tests.learners.learner_runs import Member
from tests.learners.volunteer_test import Run

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
    monkeypatch.setattr(train_command, "check_key", lambda prefix: None)
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


@pytest.mark.slow
def test_learners_that_send_4_bits_in_fragments_learn_and_replay(
  train, corpus, tmp_path
):
  """With overlap, a frozen layer and experts, whose loads are measured."""
  macros = {"OUTER_DTYPE": "e3m0", "FRAGMENTS": 2, "OVERLAP_STEPS": 1}
  macros |= {"OUTER_STEPS": 4, "TRAIN_STEPS": 24, "QUORUM": 1}
  macros |= {"MLP": "experts", "NUM_EXPERTS": 4, "EXPERTS_PER_TOKEN": 2}
  macros |= {"FROZEN": ["layers/0/attention/*"], "CHECKPOINT_STEPS": 2}
  assert train({"a": {}, "b": {"secs": 0.1}}, **macros) == 0
  metrics = runs.read_metrics(tmp_path)
  losses = [x["validation_loss"] for x in metrics if "validation_loss" in x]
  assert losses[-1] < losses[0]
  assert metrics[-1]["tokens"] == 24 * 8 * 32
  assert metrics[-1].keys() >= {"last_sync/a", "lag/b", "tokens/b"}
  first, *_, last = sorted((tmp_path / "checkpoints").iterdir())
  one, two = (
    runs.read_tensors(tmp_path, int(x.name[-8:])) for x in (first, last)
  )
  for name in one:
    is_frozen = name.startswith("layer_000/attention/")
    if not name.endswith("outer_momentum"):
      assert np.array_equal(one[name], two[name]) == is_frozen, name
  check_replay(corpus, tmp_path, **(SETTINGS | macros))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("macros", "how"),
  [
    ({"DROPOUT": 0.3}, "median"),  # of two, which is their mean
    ({"OUTER_DTYPE": "int8", "FROZEN": ["layers/0/attention/*"]}, "mean"),
    ({"MLP": "experts", "NUM_EXPERTS": 4, "EXPERTS_PER_TOKEN": 2}, "mean"),
  ],
  ids=str,
)
def test_volunteers_without_slots_take_the_steps_of_pods(
  macros, how, train, corpus, tmp_path
):
  """TensorFlow merges the work of pods, and NumPy that of volunteers.

  Each share has the dropout masks of the pod with the same rows. Pods keep
  their optimizer's slots between rounds; this one has none.
  """
  macros = macros | {"OPTIMIZER": "sgd", "BETA1": 0.0, "LEARNING_RATE": 0.05}
  macros |= {"TRAIN_STEPS": 8, "CHECKPOINT_STEPS": 8}
  volunteers, pods = tmp_path / "volunteers", tmp_path / "pods"
  volunteers.mkdir()
  given = macros | {"AUDIT_SHARE": 0.3, "GRACE_SECS": 5.0, "MERGE": how}
  assert train({"a": {}, "b": {}}, volunteers, **given) == 0
  given = SETTINGS | macros | {"LEARNERS": "", "GRACE_SECS": 5.0}
  assert runs.run("train", corpus, pods, **given) == 0
  found, wanted = (runs.read_tensors(x, 8) for x in (volunteers, pods))
  for name, value in found.items():  # pods have no momentum of what is frozen
    given = wanted.get(name, 0.0)
    np.testing.assert_allclose(value, given, atol=2e-6, err_msg=name)


@pytest.mark.slow
def test_a_record_that_pods_began_is_not_blamed_on_kernels(
  train, corpus, tmp_path, capsys
):
  """And a run of learners that resumes does not count other tasks."""
  macros = {"TRAIN_STEPS": 4, "CHECKPOINT_STEPS": 2}
  pods = SETTINGS | macros | {"LEARNERS": "", "GRACE_SECS": 5.0}
  assert runs.run("train", corpus, tmp_path, **pods) == 0
  macros["TRAIN_STEPS"] = 8
  assert train({"a": {}, "b": {}}, **macros) == 0
  capsys.readouterr()
  given = SETTINGS | macros
  given["LEARNER_TOKENS"] = str(tmp_path.with_suffix(".learners"))
  assert main(runs.arguments("train --replay", corpus, tmp_path, **given)) == 2
  assert "merges.jsonl: the run began with pods" in capsys.readouterr().err
  for macro, value, before in (("NUM_PODS", 1, 2), ("OUTER_STEPS", 4, 2)):
    changed = macros | {"TRAIN_STEPS": 12, macro: value}
    changed |= {"CHECKPOINT_STEPS": 4, "EVAL_STEPS": 4}
    (tmp_path / macro).touch()  # another token
    assert train({}, **changed) == 2
    path = tmp_path / "checkpoints/step_00000008"
    assert (
      f"palm_mtf: {macro} = {value}: {path} counts tasks with {before}; keep "
      "that value, or name it in INIT_CHECKPOINT of another MODEL_DIR."
    ) in capsys.readouterr().err.splitlines()[-1]


def refusal(**macros):
  """Returns how settings are refused; "" if they are not."""
  size = macros.get("GLOBAL_BATCH_SIZE", 8)
  run = dataclasses.replace(RUN, train_steps=8, global_batch_size=size)
  fit = {"EXCHANGE": "diloco", "PODS": "in_process", "ADAPTER": "none"}
  fit |= {"INIT_STATE": "weights", "NUM_PODS": 2, "MERGE_ALPHA": 0.0}
  fit |= {"FRAGMENTS": 1, "OVERLAP_STEPS": 0, "QUORUM": None}
  fit |= {"GRACE_SECS": 5.0}
  others = dict.fromkeys(
    ("MODEL_FUNCTION", "TEACHER", "PREFERENCE_BETA", "TASK_EVAL_STEPS")
  )
  try:
    config = LearnersConfig(
      learners=macros.get("LEARNERS", "a:1"),
      quorum=macros.get("QUORUM"),
      audit_share=macros.get("AUDIT_SHARE"),
      merge=macros.get("MERGE", "mean"),
    )
    check_learners(config, run, {**others, "TRACE_STEPS": (), **fit, **macros})
  except UserError as error:
    return str(error)
  return ""


@pytest.mark.parametrize(
  ("macros", "message"),
  [
    ({}, ""),
    ({"AUDIT_SHARE": 0.5, "MERGE": "median"}, ""),
    (
      {"AUDIT_SHARE": 0.5, "FRAGMENTS": 2},
      "FRAGMENTS = 2 and AUDIT_SHARE = 0.5: volunteers train only with "
      "FRAGMENTS = 1; set it.",
    ),
    (
      {"MERGE": "median"},
      "MERGE = 'median' and AUDIT_SHARE = None: has no effect; leave it out, "
      "or set AUDIT_SHARE, for volunteers.",
    ),
    (
      {"AUDIT_SHARE": 0.5, "LEARNERS": ""},
      'AUDIT_SHARE = 0.5 and LEARNERS = "": has no effect; leave it out, or '
      'set LEARNERS = "host:port".',
    ),
    (
      {"AUDIT_SHARE": 1.5},
      "AUDIT_SHARE = 1.5: give a number from 0.0 to 1.0, or None for learners "
      "that are trusted.",
    ),
    (
      {"QUORUM": 3},
      "QUORUM = 3 and NUM_PODS = 2: no merge would have enough learners; give "
      "at most 2, or raise NUM_PODS.",
    ),
    (
      {"QUORUM": 2, "LEARNERS": ""},
      'QUORUM = 2 and LEARNERS = "": has no effect; leave it out, or set '
      'LEARNERS = "host:port".',
    ),
    (
      {"EXCHANGE": "gradients"},
      "EXCHANGE = 'gradients' and LEARNERS = 'a:1': learners train only with "
      "EXCHANGE = 'diloco'; set it.",
    ),
    (
      {"GLOBAL_BATCH_SIZE": [[0, 4], [4, 8]]},
      "GLOBAL_BATCH_SIZE = [[0, 4], [4, 8]] and LEARNERS = 'a:1': a learner's "
      "rows stay as many; give one size, such as 8.",
    ),
  ],
  ids=str,
)
def test_what_does_not_fit_learners_is_one_line(macros, message):
  assert refusal(**macros) == message


PROCESSES = {
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
  with Run(corpus, tmp_path, **PROCESSES) as run:
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
