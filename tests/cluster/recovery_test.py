# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A run that loses a pod's server ends as one that was planned that way."""

import contextlib
import os
import re
import signal
import time

import pytest

from palm_mtf.checkpoints import tensors
from palm_mtf.cluster.heartbeat import PodLostError
from palm_mtf.cluster.local_servers import PodServers
from palm_mtf.cluster.recovery import PodRecovery
from palm_mtf.config.pods import PodsConfig
from palm_mtf.errors import UserError
from palm_mtf.training import finite_check, loop, replica_check
from palm_mtf.training.step import TrainStep
from tests import runs
from tests.cluster.local_servers_test import servers_of
from tests.commands.pods_serve_test import serve
from tests.mtf_testing import SINGLE, small_config
from tests.training.finite_check_test import nan_in_the_embedding, plant

SETTINGS = {
  "GLOBAL_BATCH_SIZE": 6,
  "CHECKPOINT_STEPS": 4,
  "EVAL_STEPS": 1000,
  "PODS": "local_servers",
  "POD_TIMEOUT_SECS": 4.0,
  "PROMPTS": [],
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return runs.write_corpus(tmp_path_factory.mktemp("text") / "corpus")


def train(corpus, model_dir, sent=None, **macros):
  """Trains; sends a signal to the second pod after the first checkpoint."""
  process = runs.start("train", corpus, model_dir, **{**SETTINGS, **macros})
  if sent is not None:
    first = model_dir / "checkpoints" / "step_00000004"
    while process.poll() is None and not first.exists():
      time.sleep(0.01)
    os.kill(servers_of(process.pid)[1], sent)
  _, error = process.communicate(timeout=240)
  assert process.returncode == 0, error
  return error


def going_on_from(error):
  """Returns the step of the last line that says where the run goes on."""
  *_, line = [x for x in error.splitlines() if "going on from step" in x]
  return int(line.partition("going on from step ")[2].split()[0])


@pytest.mark.slow
def test_a_pod_that_comes_back_leaves_the_bits_of_an_undisturbed_run(
  corpus, tmp_path
):
  settings = {"NUM_PODS": 2, "TRAIN_STEPS": 60}
  error = train(
    corpus,
    tmp_path / "lost",
    signal.SIGKILL,
    ON_POD_FAILURE="wait",
    **settings,
  )
  assert 4 <= going_on_from(error) < 60
  train(corpus, tmp_path / "undisturbed", **settings)
  runs.assert_same_tensors(tmp_path / "lost", tmp_path / "undisturbed", 60)


@pytest.mark.slow
def test_pods_that_are_left_train_what_was_planned_for_them(corpus, tmp_path):
  """Two of three pods: a core for each, as the machine has two."""
  settings = {"TRAIN_STEPS": 60}
  error = train(
    corpus,
    tmp_path / "lost",
    signal.SIGSTOP,
    NUM_PODS=3,
    ON_POD_FAILURE="shrink",
    **settings,
  )
  step = going_on_from(error)
  planned = tmp_path / "planned"
  train(corpus, planned, NUM_PODS=3, TRAIN_STEPS=step)
  train(corpus, planned, NUM_PODS=2, **settings)
  runs.assert_same_tensors(tmp_path / "lost", planned, 60)


@pytest.mark.slow
def test_a_server_of_another_host_that_is_started_anew_is_taken_back(
  corpus, tmp_path
):
  with contextlib.ExitStack() as stack:

    def started(port=0):
      server = serve(1, port=port)
      stack.enter_context(server)
      stack.callback(server.kill)
      return server

    servers = [started(), started()]
    addresses = [x.stdout.readline().split()[-1] for x in servers]
    settings = {
      **SETTINGS,
      "NUM_PODS": 2,
      "PODS": "cluster",
      "ISLANDS": [[x] for x in addresses],
      "TRAIN_STEPS": 60,
      "ON_POD_FAILURE": "wait",
    }
    process = runs.start("train", corpus, tmp_path / "lost", **settings)
    saved = tmp_path / "lost/checkpoints/step_00000004"
    while process.poll() is None and not saved.exists():
      time.sleep(0.01)
    servers[1].kill()
    servers[1].wait()
    started(addresses[1].rpartition(":")[2])
    _, error = process.communicate(timeout=240)
    assert process.returncode == 0, error
    train(corpus, tmp_path / "undisturbed", **settings)
  assert 4 <= going_on_from(error) < 60
  runs.assert_same_tensors(tmp_path / "lost", tmp_path / "undisturbed", 60)


@pytest.mark.slow
def test_pods_that_are_lost_at_once_are_all_done_without(corpus, tmp_path):
  with contextlib.ExitStack() as stack:
    servers = [stack.enter_context(serve(1)) for _ in range(3)]
    for server in servers:
      stack.callback(server.kill)
    islands = [[x.stdout.readline().split()[-1]] for x in servers]
    settings = {**SETTINGS, "PODS": "cluster", "CHECKPOINT_STEPS": 20}
    three = {**settings, "NUM_PODS": 3, "ISLANDS": islands}
    one = {**settings, "NUM_PODS": 1, "ISLANDS": islands[1:2]}

    planned = tmp_path / "planned"
    train(corpus, planned, **three, TRAIN_STEPS=20)
    train(corpus, planned, **one, TRAIN_STEPS=40)

    process = runs.start(
      *["train", corpus, tmp_path / "lost"],
      **{**three, "TRAIN_STEPS": 40, "ON_POD_FAILURE": "shrink"},
    )
    saved = tmp_path / "lost/checkpoints/step_00000020"
    while process.poll() is None and not saved.exists():
      time.sleep(0.01)
    for pod in (0, 2):
      servers[pod].send_signal(signal.SIGSTOP)
    _, error = process.communicate(timeout=240)
  assert process.returncode == 0, error
  assert going_on_from(error) == 20
  assert "on 2 pods" in error and "on 1 pods" in error
  runs.assert_same_tensors(tmp_path / "lost", planned, 40)


def killing(monkeypatch, owner, name, which):
  """Lets a call of `owner`.`name`, the one of that number, lose a pod first."""
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
  "while its variables were set": (loop, "TrainStep", 1),
  r"while pods were compared after step \d+": (
    replica_check.ReplicaCheck,
    "check",
    3,
  ),
  r"while step \d+ was saved": (tensors.WeightsCopier, "copy", 2),
  r"while the loss of step \d+ was measured": (
    TrainStep,
    "mean_loss",
    2,
  ),
}


@pytest.mark.parametrize(
  "phases",
  [
    list(PHASES)[2:3],
    pytest.param(list(PHASES), marks=pytest.mark.slow),
  ],
  ids=["one", "each"],
)
def test_a_pod_may_be_lost_in_any_phase(
  corpus, tmp_path, capsys, monkeypatch, phases
):
  """Each time it is taken back, and in the end not a bit is different."""
  for phase in phases:
    killing(monkeypatch, *PHASES[phase])
  settings = {**LOCAL, "FINGERPRINT_STEPS": 3}
  lost = {**settings, "ON_POD_FAILURE": "wait"}
  assert runs.run("train", corpus, tmp_path / "lost", **lost) == 0
  error = capsys.readouterr().err
  for phase in phases:
    assert re.search(
      r"pod \d: its server \S+ \(process \d+\) was killed by SIGKILL, "
      rf"{phase}; ON_POD_FAILURE = 'wait'",
      error,
    ), phase
  settings |= {"PODS": "in_process"}
  assert runs.run("train", corpus, tmp_path / "whole", **settings) == 0
  runs.assert_same_tensors(tmp_path / "lost", tmp_path / "whole", 12)


@pytest.mark.slow
def test_a_pod_lost_while_a_diverged_step_is_looked_into_is_named(
  corpus, tmp_path, capsys, monkeypatch
):
  assert runs.run("train", corpus, tmp_path, PROMPTS=[]) == 0
  plant(tmp_path, nan_in_the_embedding)
  killing(monkeypatch, finite_check.FiniteCheck, "error_of_step", 1)
  settings = {**LOCAL, "TRAIN_STEPS": 14}
  assert runs.run("train", corpus, tmp_path, **settings) == 2
  line = capsys.readouterr().err.splitlines()[-1]
  assert re.fullmatch(
    r"palm_mtf: pod 0: its server \S+ \(process \d+\) was killed by SIGKILL, "
    r"in step \d+; run the same command to go on\.",
    line,
  ), line


def message_of(lost, pods, recovery, step=0):
  with pytest.raises(UserError) as error:
    recovery.pods_after(lost, pods, SINGLE, step)
  return str(error.value)


def test_a_batch_that_fewer_pods_cannot_share_ends_the_run():
  pods = PodsConfig(num_pods=2, on_pod_failure="shrink")
  lost = PodLostError(1, "pod 1 is gone")
  with PodServers(pods, SINGLE) as servers:
    recovery = PodRecovery(servers, small_config(), [5, 4])
    alone = PodsConfig(num_pods=1, on_pod_failure="shrink")
    assert message_of(lost, alone, recovery) == (
      "pod 1 is gone; no pod is left to shrink to."
    )
    three = PodsConfig(num_pods=3, on_pod_failure="shrink")
    assert message_of(lost, three, recovery).startswith(
      "pod 1 is gone; the run cannot shrink to 2 pods: a batch of 5 is not "
      "divisible by NUM_PODS = 2."
    )


def test_a_pod_that_is_lost_again_and_again_ends_the_run():
  pods = PodsConfig(num_pods=2, on_pod_failure="wait")
  lost = PodLostError(1, "pod 1 is gone")
  with PodServers(pods, SINGLE) as servers:
    recovery = PodRecovery(servers, small_config(), [4])
    for _ in range(3):
      assert recovery.pods_after(lost, pods, SINGLE, 8) == pods
    assert message_of(lost, pods, recovery, 8) == (
      "pod 1 is gone; 4 times a pod was lost since step 8 was saved; save more "
      "often (CHECKPOINT_STEPS), or see to that pod, and run the same command "
      "to go on."
    )
    assert recovery.pods_after(lost, pods, SINGLE, 12) == pods
