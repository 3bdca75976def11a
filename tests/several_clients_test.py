# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Several clients on the same servers do not notice each other."""

import contextlib
import json
import re
import signal
import time

import numpy as np
import pytest

from palm_mtf import runtime
from tests import processes, runs
from tests.commands.pods_test import Processes
from tests.processes import wait_until
from tests.relay import Relay
from tests.runtime.client.connect_test import resident_bytes_of
from tests.runtime.served import Served

TIMEOUT_SECS = 8.0
SETTINGS = {
  "NUM_PODS": 2,
  "PROMPTS": [],
  "TRAIN_STEPS": 60,
  "CHECKPOINT_STEPS": 20,
  "EVAL_STEPS": 20,
  "POD_TIMEOUT_SECS": TIMEOUT_SECS,
}
# 27 million parameters, which are 320 MB with optimizer slots. Servers that do
# the same work differ by 0.1 GB.
LARGE = {
  "NUM_LAYERS": 2,
  "D_MODEL": 512,
  "D_FF": 8192,
  "TRAIN_STEPS": 1000,
  "CHECKPOINT_STEPS": 2,
  "EVAL_STEPS": 1000,
}
LARGE_BYTES = 320e6
# TensorFlow's allocator keeps freed memory for later clients. The system's
# allocator returns it, so that it can be seen.
RETURNS_MEMORY = {"TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1"}


def cluster(servers, **macros):
  """Returns the settings of a run on servers."""
  return {**SETTINGS, "PODS": "cluster", "ISLANDS": servers.islands, **macros}


def has_step(model_dir, step):
  return (model_dir / f"checkpoints/step_{step:08d}").exists()


@contextlib.contextmanager
def training(corpus, model_dir, step, **macros):
  """Yields a process that trains, once it has saved a step."""
  with runs.start("train", corpus, model_dir, **macros) as process:
    try:
      wait_until(lambda: has_step(model_dir, step), process)
      yield process
    finally:
      process.kill()


def train_alone(corpus, model_dir, **macros):
  """Trains in one process, to the end."""
  settings = {**SETTINGS, **macros, "PODS": "in_process"}
  runs.finish(runs.start("train", corpus, model_dir, **settings))


def lines_of(model_dir):
  return [runs.without_times(x) for x in runs.read_metrics(model_dir)]


@pytest.mark.slow
def test_three_runs_and_an_evaluation_at_once_have_the_bits_of_each_by_itself(
  corpus, tmp_path
):
  """All read the same batches; one has the pods in the opposite order."""
  rates = {"a": 0.01, "b": 0.02, "c": 0.03}
  with Served(2) as servers:
    islands = {"a": servers.islands, "b": servers.islands}
    islands["c"] = servers.islands[::-1]
    started = {
      name: runs.start(
        "train",
        corpus,
        tmp_path / name,
        **cluster(servers, LEARNING_RATE=rate, ISLANDS=islands[name]),
      )
      for name, rate in rates.items()
    }
    wait_until(lambda: has_step(tmp_path / "a", 20), started["a"])
    evaluation = runs.start("evaluate --json", corpus, tmp_path / "a")
    printed, error = evaluation.communicate(timeout=240)
    assert evaluation.returncode == 0, error
    for process in started.values():
      runs.finish(process)
  for name, rate in rates.items():
    alone = tmp_path / f"{name}_alone"
    train_alone(corpus, alone, LEARNING_RATE=rate)
    runs.assert_same_tensors(tmp_path / name, alone, 60)
    assert lines_of(tmp_path / name) == lines_of(alone)
  found = json.loads(printed)
  (line,) = [
    x
    for x in lines_of(tmp_path / "a")
    if x["step"] == found["step"] and "validation_loss" in x
  ]
  assert found["validation_loss"] == pytest.approx(line["validation_loss"])


@pytest.mark.slow
def test_a_run_an_evaluation_and_traced_programs_share_a_managers_servers(
  corpus, tmp_path
):
  managed = {**SETTINGS, "PODS": "cluster", "ISLANDS": "auto"}
  managed |= {"TRAIN_STEPS": 400, "CHECKPOINT_STEPS": 200}
  run, alone = tmp_path / "run", tmp_path / "alone"
  with Processes(tmp_path) as pods:
    addresses = {pods.serve()[1] for _ in range(2)}
    managed["MANAGER"] = pods.address
    with training(corpus, run, 200, **managed) as process:
      evaluation = processes.start(
        *("-m", "palm_mtf", "evaluate", "--json", "--model_dir", run)
      )
      with runtime.connect_managed(pods.address, ["2"]) as client:
        (slice_,) = client.slices("2")
        total = runtime.function(lambda x: runtime.all_sum(x)).on(slice_)
        listed = pods.list_all()
        owners = {x["address"]: x["owners"] for x in listed if "owners" in x}
        assert owners.keys() == addresses
        assert [len(x) for x in owners.values()] == [2, 2]
        while evaluation.poll() is None:
          found = total(np.arange(4.0)).fetch()
          np.testing.assert_array_equal(found, [2, 4, 2, 4])
      printed, error = evaluation.communicate()
      assert evaluation.returncode == 0, error
      runs.finish(process)
  steps = {"TRAIN_STEPS": 400, "CHECKPOINT_STEPS": 200}
  train_alone(corpus, alone, **steps)
  runs.assert_same_tensors(run, alone, 400)
  found = json.loads(printed)
  lines = [x for x in lines_of(alone) if x["step"] == found["step"]]
  assert found["validation_loss"] == pytest.approx(
    next(x["validation_loss"] for x in lines if "validation_loss" in x)
  )


def memory_of(servers):
  """Returns the resident bytes of each server."""
  return [resident_bytes_of(x.pid) for x in servers.processes]


def wait_until_returned(servers, before, held):
  """Waits until the servers have returned most of what a client added.

  Returns the seconds.
  """
  # Compiled code and partly used pages stay: a tenth to a fourth.
  most = [x + (y - x) / 3 for x, y in zip(before, held, strict=True)]
  start = time.monotonic()
  while any(x > y for x, y in zip(memory_of(servers), most, strict=True)):
    assert time.monotonic() - start < 3 * TIMEOUT_SECS, memory_of(servers)
    time.sleep(0.1)
  return time.monotonic() - start


@pytest.mark.slow
def test_a_killed_client_gives_its_memory_back_and_another_does_not_notice(
  corpus, tmp_path
):
  steps = {"TRAIN_STEPS": 400, "CHECKPOINT_STEPS": 200}
  with Served(2, variables=RETURNS_MEMORY) as servers:
    settings = cluster(servers, **steps)
    with training(corpus, tmp_path / "other", 200, **settings) as other:
      before = memory_of(servers)
      large = cluster(servers, **LARGE)
      with training(corpus, tmp_path / "large", 2, **large) as client:
        held = memory_of(servers)
        client.send_signal(signal.SIGKILL)
        secs = wait_until_returned(servers, before, held)
      runs.finish(other)
  assert min(held) - max(before) > LARGE_BYTES
  assert secs < TIMEOUT_SECS
  train_alone(corpus, tmp_path / "alone", **steps)
  runs.assert_same_tensors(tmp_path / "other", tmp_path / "alone", 400)


@pytest.mark.slow
def test_a_suspended_client_counts_as_gone_and_is_told_so(corpus, tmp_path):
  with Served(2, variables=RETURNS_MEMORY) as servers:
    before = memory_of(servers)
    large = cluster(servers, **LARGE)
    with training(corpus, tmp_path, 2, **large) as client:
      held = memory_of(servers)
      client.send_signal(signal.SIGSTOP)
      wait_until_returned(servers, before, held)
      client.send_signal(signal.SIGCONT)
      _, error = client.communicate(timeout=120)
  assert client.returncode == 2
  assert re.fullmatch(
    r"palm_mtf: pod \d: its server \S+ answers, but has broken off \(it had no "
    r"answer from this client for 8 seconds, or its connection to another pod "
    r"has ended\), .*; run the same command to resume\.",
    error.splitlines()[-1],
  ), error


@pytest.mark.slow
def test_a_client_that_is_cut_off_loses_its_pod_and_another_does_not_notice(
  corpus, tmp_path
):
  steps = {"TRAIN_STEPS": 400, "CHECKPOINT_STEPS": 200}
  with (
    Served(2) as servers,
    contextlib.closing(Relay(servers.addresses[1])) as relay,
  ):
    through_relay = [servers.islands[0], [relay.address]]
    settings = cluster(servers, TRAIN_STEPS=100_000, ISLANDS=through_relay)
    with training(corpus, tmp_path / "cut_off", 20, **settings) as client:
      settings = cluster(servers, **steps)
      with training(corpus, tmp_path / "other", 200, **settings) as other:
        relay.fail_after(0, closes=True)
        _, error = client.communicate(timeout=120)
        runs.finish(other)
  assert client.returncode == 2
  assert re.match(
    rf"palm_mtf: pod 1: its server {relay.address} has not answered for 8 "
    "seconds, ",
    error.splitlines()[-1],
  ), error
  train_alone(corpus, tmp_path / "alone", **steps)
  runs.assert_same_tensors(tmp_path / "other", tmp_path / "alone", 400)


@pytest.mark.slow
def test_a_server_frees_the_memory_of_a_client_that_could_not_leave_it(
  corpus, tmp_path
):
  """The client comes back to the server, which was suspended, in a new session.

  Without the client's word, the server would hold both sessions.
  """
  with Served(2, variables=RETURNS_MEMORY) as servers:
    large = cluster(servers, **LARGE, ON_POD_FAILURE="wait")
    with training(corpus, tmp_path, 2, **large) as client:
      servers.processes[1].send_signal(signal.SIGSTOP)
      time.sleep(3 * TIMEOUT_SECS)
      servers.processes[1].send_signal(signal.SIGCONT)
      for line in client.stderr:
        if "continuing from step" in line:
          break
      step = int(line.partition("continuing from step ")[2].split()[0])
      wait_until(lambda: has_step(tmp_path, step + 2), client)
      # Both servers need more while a checkpoint is written, so take the least
      # of some seconds. The first server has had one session all the time.
      samples = []
      for _ in range(8):
        samples.append(memory_of(servers))
        time.sleep(0.5)
  one, other = map(min, zip(*samples, strict=True))
  assert other < one + LARGE_BYTES / 2
