# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole runs with batch ramps, other pods, all packings, and the cache."""

import gc
import json
import os
import re
import signal
import threading
import time

import pytest

from palm_mtf._tf import tf
from palm_mtf.checkpoints import variables
from palm_mtf.checkpoints.manifest import find_checkpoints, newest_whole
from palm_mtf.checkpoints.variables import CheckpointReader
from palm_mtf.config import PodsConfig
from palm_mtf.executors.host.executor import EXECUTOR
from palm_mtf.generation.inference import sessions
from palm_mtf.machine.host_memory import free_garbage
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.client.heartbeat import PodLostError
from palm_mtf.runtime.client.local_servers import PodServers
from palm_mtf.training import loop, session, supervisor
from palm_mtf.training.job import TrainJob
from palm_mtf.training.loop import TrainLoop
from palm_mtf.training.supervisor import PodRecovery
from palm_mtf.training.variable_checks import VariableChecks
from tests import runs
from tests.cases import slow
from tests.mtf_testing import SINGLE, small_config
from tests.refusals import message_of
from tests.runtime.client.local_servers_test import servers_of
from tests.runtime.served import Served
from tools.bench.cases.memory import (
  add_task,
  make_macros,
  spikes_in_every_second_step,
)


@pytest.mark.slow
def test_a_batch_ramp_in_stages_has_the_bits_of_one_mesh(corpus, tmp_path):
  """With dropout and validation; one run in stages is stopped and resumed."""
  settings = {"GLOBAL_BATCH_SIZE": [[0, 2], [3, 8], [5, 4]], "LOG_STEPS": 1}
  settings |= {"NUM_LAYERS": 2, "NUM_MICROBATCHES": 2, "DROPOUT": 0.1}
  settings |= {"EVAL_STEPS": 2, "PROMPTS": []}
  whole, staged, stopped = (
    tmp_path / x for x in ("whole", "staged", "stopped")
  )
  for folder, stages, steps in (
    (whole, 1, 7),
    (staged, 2, 7),
    (stopped, 2, 5),
    (stopped, 2, 7),
  ):
    here = {"STAGES": stages, "TRAIN_STEPS": steps}
    assert runs.run("train", corpus, folder, **settings, **here) == 0
    if steps == 7:
      runs.assert_same_tensors(whole, folder, steps)
  found, expected = (
    [runs.without_times(x) for x in runs.read_metrics(y)]
    for y in (staged, whole)
  )
  assert found == expected
  tokens = [line["global_batch_tokens"] // 32 for line in found]
  assert tokens == [2, 2, 2, 8, 8, 4, 4]


# As in DeepSeek-V3, so a checkpoint holds the loads and biases of routers.
EXPERTS = {
  "MLP": "experts",
  "NUM_EXPERTS": 4,
  "EXPERTS_PER_TOKEN": 2,
  "ROUTER": "sigmoid",
  "ROUTER_BIAS": True,
}


@pytest.mark.parametrize(
  ("optimizer", "settings"),
  [
    ("adamw", {}),
    slow("adamw", EXPERTS),
    slow("muon", EXPERTS | {"NUM_PODS": 2, "NUM_MICROBATCHES": 2}),
    slow("muon", {"NUM_PODS": 2, "NUM_MICROBATCHES": 2}),
    slow("muon", {"NUM_LAYERS": 2, "STAGES": 2, "NUM_MICROBATCHES": 2}),
  ],
)
def test_a_resumed_run_has_the_bits_of_one_in_one_go(
  corpus, tmp_path, capsys, optimizer, settings
):
  """And gives its moments to no other optimizer."""
  settings = {"PROMPTS": [], "CHECKPOINT_STEPS": 2, **settings}
  own = {"OPTIMIZER": optimizer, "BETA2": 0.95, "WEIGHT_DECAY": 0.1}
  one, two = tmp_path / "one", tmp_path / "two"
  macros = {**settings, **own, "TRAIN_STEPS": 4}
  assert runs.run("train", corpus, one, **macros) == 0
  runs.copy_until(one, two, 2)
  assert runs.run("train", corpus, two, **macros) == 0
  runs.assert_same_tensors(one, two, 4)
  capsys.readouterr()
  initial = {
    "INIT_CHECKPOINT": str(one),
    "INIT_STATE": "all",
    "VOCABULARY": str(one / "vocabulary.model"),
  }
  for folder, more in ((one, {}), (tmp_path / "other", initial)):
    macros = {**settings, **more, "TRAIN_STEPS": 6}
    assert runs.run("train", corpus, folder, **macros) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    place = f"{one}/checkpoints/step_00000004"
    assert line.startswith(
      f"palm_mtf: OPTIMIZER = 'adafactor': {place} was written with "
      f"'{optimizer}', so its moments do not fit; start a new optimizer from "
      "its weights in another MODEL_DIR, as INIT_CHECKPOINT with INIT_STATE = "
      '"weights". (OPTIMIZER is set in '
    )


def test_a_new_batch_size_reads_and_writes_no_checkpoint(
  corpus, tmp_path, monkeypatch
):
  """The variables stay on their devices, in one session."""
  sessions, opened = [], []
  make, open_files = Client.__init__, CheckpointReader.open
  monkeypatch.setattr(
    Client, "__init__", lambda *args: sessions.append(make(*args))
  )
  monkeypatch.setattr(
    CheckpointReader,
    "open",
    lambda reader, prefix: opened.append(prefix) or open_files(reader, prefix),
  )
  settings = {"GLOBAL_BATCH_SIZE": [[0, 2], [2, 4]], "TRAIN_STEPS": 4}
  settings |= {"CHECKPOINT_STEPS": 4, "EVAL_STEPS": 4, "PROMPTS": []}
  assert runs.run("train", corpus, tmp_path, **settings) == 0
  assert len(sessions) == 1
  assert opened == []
  (checkpoint,) = find_checkpoints(str(tmp_path))
  assert checkpoint.manifest.step == 4


@pytest.mark.slow
def test_a_run_continues_with_other_pods_and_microbatches(
  corpus, finished, tmp_path, capsys
):
  for steps, num_pods, num_microbatches in ((3, 1, 2), (6, 2, 1), (12, 2, 2)):
    macros = {
      "TRAIN_STEPS": steps,
      "NUM_PODS": num_pods,
      "NUM_MICROBATCHES": num_microbatches,
      "PROMPTS": [],
    }
    assert runs.run("train", corpus, tmp_path, **macros) == 0
  expected = runs.read_metrics(finished)
  seen = {line["step"]: line for line in runs.read_metrics(tmp_path)}
  for line in expected:
    other = runs.without_times(seen[line["step"]])
    line = runs.without_times(line)
    sent = other.pop("dcn_bytes")
    assert line.pop("dcn_bytes") == 0
    assert line.pop("num_pods") == 1
    assert (sent > 0) == (other.pop("num_pods") == 2) == (line["step"] > 3)
    assert other == pytest.approx(line, rel=1e-3)
  # The same variables, and the same numbers except for rounding.
  tensors, other = (runs.read_tensors(d, 12) for d in (finished, tmp_path))
  assert {n: t.shape for n, t in other.items()} == {
    n: t.shape for n, t in tensors.items()
  }
  capsys.readouterr()
  losses = []
  for num_pods, num_microbatches in ((1, 1), (2, 2)):
    macros = {"NUM_PODS": num_pods, "NUM_MICROBATCHES": num_microbatches}
    assert runs.run("evaluate", corpus, tmp_path, **macros) == 0
    losses.append(
      capsys.readouterr().out.split("validation_loss")[1].split()[0]
    )
  assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.usefixtures("registries")
def test_no_object_is_left_of_samples_evaluations_and_rewinds(
  corpus, tmp_path, monkeypatch
):
  """Counts before each program is built; the bench measures memory."""
  counts = []

  def count():
    free_garbage()
    kinds = [type(x) for x in gc.get_objects()]
    counts.append(
      {
        "graphs": sum(issubclass(x, tf.Graph) for x in kinds),
        "sessions": sum(issubclass(x, tf.Session) for x in kinds),
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
      }
    )

  monkeypatch.setattr(supervisor, "free_garbage", count)
  monkeypatch.setattr(sessions, "free_garbage", count)
  macros: dict[str, object] = {}
  for kind in ("rewinds", "task evaluations", "samples"):
    macros = make_macros(kind, 4) | macros | {"PROMPTS": ["one two"]}
  with spikes_in_every_second_step():
    add_task()
    assert runs.run("train", corpus, tmp_path, **macros) == 0
  # Per step, a loop, tasks and samples count, before and after weights are
  # loaded. The last step's samples have no loop.
  assert len(counts) == 5 * 4
  # What each step does not free counts at all five places. A file or a thread
  # of the moment counts at one or two.
  earlier, later = (
    {kind: sum(x[kind] for x in each) for kind in each[0]}
    for each in (counts[5:10], counts[10:15])
  )
  assert all(later[kind] < earlier[kind] + 5 for kind in earlier), counts


def test_training_reads_the_cache_when_it_is_there_and_says_so(
  corpus, finished, tmp_path, capsys
):
  cache = tmp_path / "cache"
  vocabulary = str(finished / "vocabulary.model")
  settings = {"CACHE_DIR": str(cache), "VOCABULARY": vocabulary}
  assert runs.run("data cache", corpus, tmp_path / "a", **settings) == 0
  settings |= {"TRAIN_STEPS": 4, "PROMPTS": []}
  assert runs.run("train", corpus, tmp_path / "b", **settings) == 0
  assert (
    f"tokens of text_files are read from {cache}" in capsys.readouterr().err
  )
  assert not list((tmp_path / "b" / "tokens").glob("text_files-*"))
  runs.assert_same_tensors(finished, tmp_path / "b", 4)


@pytest.mark.parametrize(
  ("owner", "name", "step", "packing"),
  [
    (TrainLoop, "_save", 3, "packed"),
    slow(TrainLoop, "_validate", 2, "joined"),
    slow(TrainLoop, "_validate", 4, "joined_masked"),  # the last step
    slow(TrainJob, "write_samples", 2, "single"),
  ],
)
def test_a_signal_while_a_run_evaluates_saves_or_samples_stops_it_after_that(
  owner, name, step, packing, corpus, tmp_path, monkeypatch, capsys
):
  """With every packing, it then resumes, and has the loss of `evaluate`."""
  settings = {"TRAIN_STEPS": 4, "CHECKPOINT_STEPS": 3, "EVAL_STEPS": 2}
  settings |= {"PACKING": packing, "LOG_STEPS": 1}
  if name == "write_samples":
    settings["SAMPLE_STEPS"] = 2
  else:
    settings["PROMPTS"] = []
  model_dir = tmp_path / "lr[0.01]"  # TensorFlow takes this for a pattern
  real, sent = getattr(owner, name), []

  def interrupted(self, *given):
    now = self._step if owner is TrainLoop else given[0].manifest.step
    if now == step and not sent:
      sent.append(step)
      os.kill(os.getpid(), signal.SIGTERM)
    return real(self, *given)

  with monkeypatch.context() as patched:
    patched.setattr(owner, name, interrupted)
    assert runs.run("train", corpus, model_dir, **settings) == 128 + 15
  out, err = capsys.readouterr()
  assert out == ""
  assert "stopped by SIGTERM" in err
  assert newest_whole(str(model_dir)).manifest.step == step
  assert runs.run("train", corpus, model_dir, **settings) == 0
  first, *_, last = runs.read_metrics(model_dir)
  assert last["step"] == 4 and last["loss"] < first["loss"]
  assert runs.run("evaluate --json", corpus, model_dir, **settings) == 0
  *_, evaluated = capsys.readouterr().out.splitlines()
  assert json.loads(evaluated)["validation_loss"] == pytest.approx(
    last["validation_loss"], abs=1e-4
  )


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
def test_pods_that_are_left_train_what_was_planned_for_them(corpus, tmp_path):
  """Two of three pods are left; each has a core of the machine's two."""
  lost, planned = tmp_path / "lost", tmp_path / "planned"
  three = {"NUM_PODS": 3, "ON_POD_FAILURE": "shrink"}
  error = train(corpus, lost, sends(signal.SIGSTOP), **three)
  train(corpus, planned, NUM_PODS=3, TRAIN_STEPS=resumed_step(error))
  train(corpus, planned)
  runs.assert_same_tensors(lost, planned, 60)


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
  r"while the loss of step \d+ was measured": (loop, "mean_losses", 2),
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


LOST = PodLostError(1, "pod 1 is gone")


def test_a_batch_that_fewer_pods_cannot_share_ends_the_run():
  one, three = (PodsConfig(num_pods=n, on_pod_failure="shrink") for n in (1, 3))
  with PodServers(three, SINGLE) as servers:
    recovery = PodRecovery(servers, EXECUTOR, small_config(), [5, 4])
    assert message_of(recovery.pods_after, LOST, one, SINGLE, 0) == (
      "pod 1 is gone; no pod is left to shrink to."
    )
    assert message_of(recovery.pods_after, LOST, three, SINGLE, 0).startswith(
      "pod 1 is gone; the run cannot shrink to 2 pods: a batch of 5 is not "
      "divisible by NUM_PODS = 2."
    )


def test_a_pod_that_is_lost_again_and_again_ends_the_run():
  pods = PodsConfig(num_pods=2, on_pod_failure="wait")
  with PodServers(pods, SINGLE) as servers:
    recovery = PodRecovery(servers, EXECUTOR, small_config(), [4])
    for _ in range(3):
      assert recovery.pods_after(LOST, pods, SINGLE, 8) == pods
    assert message_of(recovery.pods_after, LOST, pods, SINGLE, 8) == (
      "pod 1 is gone; a pod was lost 4 times since step 8 was saved; save more "
      "often (CHECKPOINT_STEPS), or repair that pod, and run the same command "
      "to resume."
    )
    assert recovery.pods_after(LOST, pods, SINGLE, 12) == pods
