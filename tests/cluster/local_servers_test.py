# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Pods in processes of their own: the same bits, and none is left behind."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from palm_mtf.checkpoints.manifest import newest_whole
from palm_mtf.cluster.local_servers import PodServers, cores_of_pods
from palm_mtf.config.pods import PodsConfig
from palm_mtf.errors import UserError
from tests import runs
from tests.mtf_testing import SINGLE

LOCAL_SERVERS = PodsConfig(num_pods=2, pods="local_servers")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return runs.write_corpus(tmp_path_factory.mktemp("text") / "corpus")


def train(corpus, model_dir, **macros):
  """Trains 4 steps on two pods in a process of its own; returns its tensors."""
  settings = {"NUM_PODS": 2, "TRAIN_STEPS": 4, "PROMPTS": [], **macros}
  process = runs.start("train", corpus, model_dir, **settings)
  _, error = process.communicate(timeout=240)
  assert process.returncode == 0, error
  return runs.read_tensors(model_dir, 4)


def assert_same_bits(corpus, tmp_path, **macros):
  first = train(corpus, tmp_path / "in_process", **macros)
  second = train(
    corpus, tmp_path / "local_servers", PODS="local_servers", **macros
  )
  assert first.keys() == second.keys()
  for name, value in first.items():
    np.testing.assert_array_equal(second[name], value, err_msg=name)


def test_servers_train_the_bits_that_this_process_would(corpus, tmp_path):
  """A ramp makes a second session on the same servers, which restores."""
  ramp = [[0, 4], [3, 8]]
  assert_same_bits(corpus, tmp_path, NUM_MICROBATCHES=2, GLOBAL_BATCH_SIZE=ramp)


@pytest.mark.slow
def test_split_pods_in_servers_train_the_same_bits(corpus, tmp_path):
  split = {"MESH_SHAPE": "data:2", "LAYOUT": "batch:data"}
  assert_same_bits(corpus, tmp_path, **split, DCN_DTYPE="bfloat16")


def listening(port):
  """Returns the lines of `ss` about who listens on a port."""
  command = ["ss", "-Hltn", f"sport = :{port}"]
  return subprocess.check_output(command, text=True).splitlines()


def test_servers_hear_loopback_alone_and_are_stopped():
  with PodServers(LOCAL_SERVERS, SINGLE) as servers:
    addresses = [place.address for (place,) in servers.places()]
    for address in addresses if shutil.which("ss") else []:
      (line,) = listening(address.rpartition(":")[2])
      assert "%lo:" in line
    processes = [each.process for each in servers._servers]
    cores = [os.sched_getaffinity(process.pid) for process in processes]
  assert len(set(addresses)) == 2
  if len(os.sched_getaffinity(0)) > 1:
    assert not cores[0] & cores[1] and len(cores[0]) == len(cores[1])
  assert [process.returncode for process in processes] == [0, 0]


def test_a_server_that_ends_is_named():
  with PodServers(LOCAL_SERVERS, SINGLE) as servers:
    process = servers._servers[1].process
    process.kill()
    with pytest.raises(UserError) as error:
      servers.places()
  assert str(error.value) == (
    f"pod 1: its server (process {process.pid}) was killed by SIGKILL, at its "
    "start."
  )


def wait_until(condition, secs=60):
  end = time.monotonic() + secs
  while not condition():
    assert time.monotonic() < end, "it did not happen in time"
    time.sleep(0.05)


def servers_of(client):
  """Returns the process ids of the servers that `client` has started."""
  children = [
    int(pid)
    for path in pathlib.Path(f"/proc/{client}/task").glob("*/children")
    for pid in path.read_text().split()
  ]
  return [
    pid
    for pid in sorted(children)
    if "palm_mtf.cluster.server_process"
    in pathlib.Path(f"/proc/{pid}/cmdline").read_text()
  ]


def is_running(pid):
  try:
    state = re.search(
      r"^State:\s+(\w)", open(f"/proc/{pid}/status").read(), re.M
    )
  except FileNotFoundError:
    return False
  return state[1] != "Z"


def started(corpus, model_dir, **macros):
  """Starts a long run in servers; returns it after some steps."""
  settings = {"CHECKPOINT_STEPS": 100_000, "EVAL_STEPS": 24, **macros}
  process = runs.start(
    "train",
    corpus,
    model_dir,
    NUM_PODS=2,
    PODS="local_servers",
    TRAIN_STEPS=100_000,
    **settings,
  )
  for line in process.stderr:
    if "validation loss" in line:
      break
  return process


def test_a_killed_client_leaves_no_server(corpus, tmp_path):
  process = started(corpus, tmp_path)
  pids = servers_of(process.pid)
  assert len(pids) == 2
  process.kill()
  process.communicate()
  wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.parametrize(
  ("sent", "how"),
  [
    (signal.SIGKILL, "was killed by SIGKILL"),
    pytest.param(
      signal.SIGSTOP,
      "has not answered for 4 seconds",
      marks=pytest.mark.slow,
    ),
  ],
)
def test_a_lost_server_ends_the_run_in_time_with_its_name(
  corpus, tmp_path, sent, how
):
  process = started(corpus, tmp_path, POD_TIMEOUT_SECS=4.0, CHECKPOINT_STEPS=20)
  wait_until((tmp_path / "checkpoints" / "step_00000020").exists)
  pids = servers_of(process.pid)
  start = time.monotonic()
  os.kill(pids[1], sent)
  _, error = process.communicate(timeout=60)
  assert time.monotonic() - start < 45
  assert process.returncode == 2, error
  line = error.splitlines()[-1]
  assert re.fullmatch(
    rf"palm_mtf: pod 1: its server 127\.0\.0\.1:\d+ \(process {pids[1]}\) "
    rf"{how}, [^,;]*step \d+[^,;]*; run the same command to go on\.",
    line,
  ), line
  wait_until(lambda: not any(map(is_running, pids)))
  assert "DAMAGED" not in error
  assert newest_whole(str(tmp_path)).manifest.step >= 20


def test_cores_are_divided_equally():
  cores = cores_of_pods(2)
  assert len(cores[0]) == len(cores[1]) >= 1
  program = (
    "import os; os.sched_setaffinity(0, {0})\n"
    "from palm_mtf.cluster.local_servers import cores_of_pods\n"
    "print(cores_of_pods(3))"
  )
  done = subprocess.run(
    [sys.executable, "-c", program],
    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    capture_output=True,
    text=True,
    check=True,
  )
  assert done.stdout == "[[0], [0], [0]]\n", "there is one core for all"
