# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A run that loses a server ends like a run planned with those pods."""

import os
import re
import signal
import time

import pytest

from palm_mtf.checkpoints import variables
from palm_mtf.config import PodsConfig
from palm_mtf.errors import UserError
from palm_mtf.runtime.client.heartbeat import PodLostError
from palm_mtf.runtime.client.local_servers import PodServers
from palm_mtf.runtime.client.recovery import PodRecovery
from palm_mtf.training import loop, session
from palm_mtf.training.variable_checks import VariableChecks
from tests import runs
from tests.mtf_testing import SINGLE, small_config
from tests.runtime.client.local_servers_test import servers_of
from tests.runtime.served import Served
from tests.training.variable_checks_test import plant

SETTINGS = {
  "GLOBAL_BATCH_SIZE": 6,
  "CHECKPOINT_STEPS": 4,
  "EVAL_STEPS": 1000,
  "NUM_PODS": 2,
  "PODS": "local_servers",
  "POD_TIMEOUT_SECS": 4.0,
  "TRAIN_STEPS": 60,
  "PROMPTS": [],
}


def train(corpus, model_dir, lose=None, saved=4, **macros):
  """Trains; calls `lose` with the process once a checkpoint is saved."""
  process = runs.start("train", corpus, model_dir, **{**SETTINGS, **macros})
  if lose:
    first = model_dir / "checkpoints" / f"step_{saved:08d}"
    while process.poll() is None and not first.exists():
      time.sleep(0.01)
    lose(process)
  return runs.finish(process)


def resumed_step(error):
  """Returns the step in the last line about where the run continues."""
  *_, line = [x for x in error.splitlines() if "continuing from step" in x]
  return int(line.partition("continuing from step ")[2].split()[0])


def sends(number):
  """Returns a function that sends a signal to the second pod of a run."""
  return lambda client: os.kill(servers_of(client.pid)[1], number)


@pytest.mark.slow
def test_a_pod_that_comes_back_leaves_the_bits_of_an_undisturbed_run(
  corpus, tmp_path
):
  lost, undisturbed = tmp_path / "lost", tmp_path / "undisturbed"
  error = train(corpus, lost, sends(signal.SIGKILL), ON_POD_FAILURE="wait")
  assert 4 <= resumed_step(error) < 60
  train(corpus, undisturbed)
  runs.assert_same_tensors(lost, undisturbed, 60)


@pytest.mark.slow
def test_pods_that_are_left_train_what_was_planned_for_them(corpus, tmp_path):
  """Two of three pods are left; each has a core of the machine's two."""
  lost, planned = tmp_path / "lost", tmp_path / "planned"
  three = {"NUM_PODS": 3, "ON_POD_FAILURE": "shrink"}
  error = train(corpus, lost, sends(signal.SIGSTOP), **three)
  train(corpus, planned, NUM_PODS=3, TRAIN_STEPS=resumed_step(error))
  train(corpus, planned)
  runs.assert_same_tensors(lost, planned, 60)


@pytest.mark.slow
def test_a_server_of_another_host_that_is_started_again_is_taken_back(
  corpus, tmp_path
):
  lost, undisturbed = tmp_path / "lost", tmp_path / "undisturbed"
  with Served(2) as servers:

    def start_again(unused_client):
      servers.processes[1].kill()
      servers.processes[1].wait()
      servers.start(servers.addresses[1].rpartition(":")[2])

    cluster = {"PODS": "cluster", "ISLANDS": servers.islands}
    cluster["ON_POD_FAILURE"] = "wait"
    error = train(corpus, lost, start_again, **cluster)
    train(corpus, undisturbed, **cluster)
  assert 4 <= resumed_step(error) < 60
  runs.assert_same_tensors(lost, undisturbed, 60)


@pytest.mark.slow
def test_pods_that_are_lost_at_once_are_all_done_without(corpus, tmp_path):
  lost, planned = tmp_path / "lost", tmp_path / "planned"
  with Served(3) as servers:
    settings = {"PODS": "cluster", "CHECKPOINT_STEPS": 20}
    three = {**settings, "NUM_PODS": 3, "ISLANDS": servers.islands}
    one = {**settings, "NUM_PODS": 1, "ISLANDS": servers.islands[1:2]}
    train(corpus, planned, **three, TRAIN_STEPS=20)
    train(corpus, planned, **one, TRAIN_STEPS=40)

    def stop_two(unused_client):
      for pod in (0, 2):
        servers.processes[pod].send_signal(signal.SIGSTOP)

    three |= {"TRAIN_STEPS": 40, "ON_POD_FAILURE": "shrink"}
    error = train(corpus, lost, stop_two, saved=20, **three)
  assert resumed_step(error) == 20
  assert "on 2 pods" in error and "on 1 pods" in error
  runs.assert_same_tensors(lost, planned, 40)


def killing(monkeypatch, owner, name, which):
  """Makes call number `which` of `owner`.`name` lose a pod first."""
  original, calls = getattr(owner, name), []

  def call(*arguments, **keywords):
    calls.append(None)
    if len(calls) == which:
      os.kill(servers_of(os.getpid())[0], signal.SIGKILL)
    return original(*arguments, **keywords)

  monkeypatch.setattr(owner, name, call)


LOCAL = {
  "NUM_PODS": 2,
  "PODS": "local_servers",
  "POD_TIMEOUT_SECS": 8.0,
  "PROMPTS": [],
}
PHASES = {
  "while its variables were set": (session, "TrainStep", 1),
  r"while pods were compared after step \d+": (
    VariableChecks,
    "check_replicas",
    3,
  ),
  r"while step \d+ was saved": (variables.WeightsCopier, "copy", 2),
  # The phase is that of the first call that needs the server.
  r"(while a checkpoint was written|in step \d+|while step \d+ was saved|"
  r"while its memory was read after step \d+)": (
    variables.WeightsCopier,
    "_write_copy",
    3,
  ),
  r"while the loss of step \d+ was measured": (
    loop,
    "mean_loss",
    2,
  ),
}


@pytest.mark.slow
def test_a_pod_may_be_lost_in_any_phase(corpus, tmp_path, capsys, monkeypatch):
  """The pod comes back each time, and in the end no bit is different."""
  settings = {**LOCAL, "FINGERPRINT_STEPS": 3}
  # The first run compiles; otherwise both servers would compile the same code.
  whole = {**settings, "PODS": "in_process"}
  assert runs.run("train", corpus, tmp_path / "whole", **whole) == 0
  for place in PHASES.values():
    killing(monkeypatch, *place)
  lost = {**settings, "ON_POD_FAILURE": "wait"}
  assert runs.run("train", corpus, tmp_path / "lost", **lost) == 0
  error = capsys.readouterr().err
  for phase in PHASES:
    assert re.search(
      r"pod \d: its server \S+ \(process \d+\) was killed by SIGKILL, "
      rf"{phase}; ON_POD_FAILURE = 'wait'",
      error,
    ), phase
  runs.assert_same_tensors(tmp_path / "lost", tmp_path / "whole", 12)


@pytest.mark.slow
def test_a_pod_lost_while_a_diverged_step_is_looked_into_is_named(
  corpus, tmp_path, capsys, monkeypatch
):
  assert runs.run("train", corpus, tmp_path, PROMPTS=[]) == 0
  plant(tmp_path, "embedding", (7, 3), float("nan"))
  killing(monkeypatch, VariableChecks, "make_step_error", 1)
  settings = {**LOCAL, "TRAIN_STEPS": 14}
  assert runs.run("train", corpus, tmp_path, **settings) == 2
  line = capsys.readouterr().err.splitlines()[-1]
  assert re.fullmatch(
    r"palm_mtf: pod 0: its server \S+ \(process \d+\) was killed by SIGKILL, "
    r"in step \d+; run the same command to resume\.",
    line,
  ), line


LOST = PodLostError(1, "pod 1 is gone")


def message_of(pods, recovery, step=0):
  with pytest.raises(UserError) as error:
    recovery.pods_after(LOST, pods, SINGLE, step)
  return str(error.value)


def test_a_batch_that_fewer_pods_cannot_share_ends_the_run():
  one, three = (PodsConfig(num_pods=n, on_pod_failure="shrink") for n in (1, 3))
  with PodServers(three, SINGLE) as servers:
    recovery = PodRecovery(servers, small_config(), [5, 4])
    assert message_of(one, recovery) == (
      "pod 1 is gone; no pod is left to shrink to."
    )
    assert message_of(three, recovery).startswith(
      "pod 1 is gone; the run cannot shrink to 2 pods: a batch of 5 is not "
      "divisible by NUM_PODS = 2."
    )


def test_a_pod_that_is_lost_again_and_again_ends_the_run():
  pods = PodsConfig(num_pods=2, on_pod_failure="wait")
  with PodServers(pods, SINGLE) as servers:
    recovery = PodRecovery(servers, small_config(), [4])
    for _ in range(3):
      assert recovery.pods_after(LOST, pods, SINGLE, 8) == pods
    assert message_of(pods, recovery, 8) == (
      "pod 1 is gone; a pod was lost 4 times since step 8 was saved; save more "
      "often (CHECKPOINT_STEPS), or repair that pod, and run the same command "
      "to resume."
    )
    assert recovery.pods_after(LOST, pods, SINGLE, 12) == pods
