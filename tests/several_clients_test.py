# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Several clients on the same servers do not notice each other."""

import contextlib
import json
import signal
import time

import pytest

from tests import runs
from tests.processes import wait_until
from tests.runtime.client.connect_test import resident_bytes_of
from tests.runtime.served import Served

SETTINGS = {
  "NUM_PODS": 2,
  "PROMPTS": [],
  "TRAIN_STEPS": 60,
  "CHECKPOINT_STEPS": 20,
  "EVAL_STEPS": 20,
  "POD_TIMEOUT_SECS": 8.0,
}
# 14 million parameters, which are 170 MB with optimizer slots.
LARGE = {"NUM_LAYERS": 2, "D_MODEL": 512, "D_FF": 4096}
LARGE_BYTES = 160e6
# TensorFlow's own allocator keeps freed memory for later. The system's
# allocator returns it, so that the tests can see it.
RETURNS_MEMORY = {"TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1"}


def cluster(servers, **macros):
  """Returns the settings of a run on servers."""
  return {**SETTINGS, "PODS": "cluster", "ISLANDS": servers.islands, **macros}


def has_step(model_dir, step):
  return (model_dir / f"checkpoints/step_{step:08d}").exists()


@contextlib.contextmanager
def training(corpus, model_dir, first_step, **macros):
  """Yields a process that trains, after its first checkpoint."""
  with runs.start("train", corpus, model_dir, **macros) as process:
    try:
      wait_until(lambda: has_step(model_dir, first_step), process)
      yield process
    finally:
      process.kill()


def train_alone(corpus, model_dir, **macros):
  settings = {**SETTINGS, **macros, "PODS": "in_process"}
  runs.finish(runs.start("train", corpus, model_dir, **settings))


@pytest.mark.slow
def test_three_runs_and_an_evaluation_at_once_have_the_bits_of_each_by_itself(
  corpus, tmp_path
):
  """Two runs read the same batches; the third has another order of pods."""
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
    losses, error = evaluation.communicate(timeout=240)
    assert evaluation.returncode == 0, error
    for process in started.values():
      runs.finish(process)
  for name, rate in rates.items():
    alone = tmp_path / f"{name}_alone"
    train_alone(corpus, alone, LEARNING_RATE=rate)
    runs.assert_same_tensors(tmp_path / name, alone, 60)
    lines = [
      [runs.without_times(x) for x in runs.read_metrics(y)]
      for y in (tmp_path / name, alone)
    ]
    assert lines[0] == lines[1]
  found = json.loads(losses)
  (line,) = [
    x
    for x in runs.read_metrics(tmp_path / "a")
    if x["step"] == found["step"] and "validation_loss" in x
  ]
  assert found["validation_loss"] == pytest.approx(line["validation_loss"])


def memory_of(servers):
  return [resident_bytes_of(x.pid) for x in servers.processes]


def wait_for_memory(servers, most, secs):
  """Waits until no server holds more than `most` bytes; returns the seconds."""
  start = time.monotonic()
  while any(x > y for x, y in zip(memory_of(servers), most, strict=True)):
    assert time.monotonic() - start < secs, (memory_of(servers), most)
    time.sleep(0.1)
  return time.monotonic() - start


@pytest.mark.slow
def test_a_killed_client_gives_its_memory_back_and_the_other_does_not_notice(
  corpus, tmp_path
):
  with Served(2, variables=RETURNS_MEMORY) as servers:
    other = cluster(servers, TRAIN_STEPS=400, CHECKPOINT_STEPS=200)
    with training(corpus, tmp_path / "other", 200, **other) as process:
      before = memory_of(servers)
      large = cluster(servers, **LARGE, TRAIN_STEPS=1000, CHECKPOINT_STEPS=2)
      with training(corpus, tmp_path / "large", 2, **large) as killed:
        held = memory_of(servers)
        assert all(
          x - y > LARGE_BYTES for x, y in zip(held, before, strict=True)
        )
        killed.send_signal(signal.SIGKILL)
        secs = wait_for_memory(servers, [x + 60e6 for x in before], 8.0)
      print(
        f"\nmemory before {before}, held {held}, after {memory_of(servers)}"
      )
      print(f"given back after {secs:.1f} s")
      runs.finish(process)
  train_alone(corpus, tmp_path / "alone", TRAIN_STEPS=400, CHECKPOINT_STEPS=200)
  runs.assert_same_tensors(tmp_path / "other", tmp_path / "alone", 400)
