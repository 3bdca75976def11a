# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""metrics.jsonl has the memory of the servers, pod by pod."""

import os
import re
import signal
import time
import types

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.checkpoints.manifest import newest_whole
from palm_mtf.cluster.server_memory import ServerMemory
from palm_mtf.mesh.host_functions import Host
from tests import runs
from tests.cluster.local_servers_test import is_running, servers_of, wait_until


def resident_bytes_of(pid):
  """Returns what ps(1) says of a process."""
  with open(f"/proc/{pid}/statm", encoding="ascii") as file:
    return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_pod_has_the_number_of_its_largest_server():
  tasks = ["pod_0/replica:0/task:0", "pod_0/task:1", "pod_1/task:0"]
  servers = [Host(f"/job:{x}/device:cpu:0") for x in tasks]

  def run(read):
    assert [len(x) for x in read.values()] == [2, 1]
    return {"pod_0": [np.int64(5), np.int64(9)], "pod_1": [np.int64(7)]}

  with tf.Graph().as_default():
    memory = ServerMemory(types.SimpleNamespace(run=run), servers)
  assert memory.read() == {
    "host_memory_bytes/pod_0": 9,
    "host_memory_bytes/pod_1": 7,
  }


@pytest.mark.slow
def test_every_line_has_the_memory_of_each_server_and_a_lost_one_is_named(
  corpus, tmp_path, monkeypatch, capsys
):
  real, seen, lost = ServerMemory.read, [], []

  def read(memory):
    pids = servers_of(os.getpid())
    before = [*map(resident_bytes_of, pids)]
    if len(seen) == 3:
      wait_until((tmp_path / "checkpoints" / "step_00000002").exists)
      os.kill(pids[1], signal.SIGKILL)
      lost.append((time.monotonic(), pids))
    found = real(memory)
    seen.append((found, before, [*map(resident_bytes_of, pids)]))
    return found

  monkeypatch.setattr(ServerMemory, "read", read)
  settings = {"NUM_PODS": 2, "PODS": "local_servers", "LOG_STEPS": 1}
  settings |= {"POD_TIMEOUT_SECS": 4.0, "CHECKPOINT_STEPS": 2}
  assert runs.run("train", corpus, tmp_path, **settings) == 2
  ((start, pids),) = lost
  assert time.monotonic() - start < 45
  assert not any(map(is_running, pids))
  assert newest_whole(str(tmp_path)).manifest.step == 2
  lines = runs.read_metrics(tmp_path)
  assert [line["step"] for line in lines] == [1, 2, 3]
  for line, (found, before, after) in zip(lines, seen, strict=True):
    assert found.items() <= line.items()
    # A server that writes a checkpoint frees memory meanwhile.
    for size, *sizes in zip(found.values(), before, after, strict=True):
      assert 0.98 * min(sizes) < size < 1.02 * max(sizes)
    assert line["host_memory_bytes"] not in found.values()
  error = capsys.readouterr().err
  assert "DAMAGED" not in error
  line = error.splitlines()[-1]
  assert re.fullmatch(
    rf"palm_mtf: pod 1: its server 127\.0\.0\.1:\d+ \(process {pids[1]}\) was "
    r"killed by SIGKILL, while its memory was read after step 4; run the same "
    r"command to go on\.",
    line,
  ), line


def test_pods_in_process_have_the_memory_of_the_process_alone():
  assert ServerMemory(None, []).read() == {}
