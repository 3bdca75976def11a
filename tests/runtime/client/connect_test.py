# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Wherever pods are, they train the same bits; their memory is logged."""

import dataclasses
import functools
import os
import re
import signal
import time
import types

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.checkpoints.manifest import newest_whole
from palm_mtf.config import MeshLayout, PodsConfig
from palm_mtf.executors.host.starter import HostStarter
from palm_mtf.native.operations import operations
from palm_mtf.runtime.client import connect
from palm_mtf.runtime.client.connect import memory_reader
from palm_mtf.runtime.client.local_servers import cores_of_pods
from palm_mtf.runtime.client.places import Place
from palm_mtf.runtime.processes import Process
from palm_mtf.runtime.server.start import start_server
from palm_mtf.runtime.server_info import read_info
from palm_mtf.training import session
from tests import runs
from tests.cases import slow
from tests.processes import is_running, wait_for
from tests.runtime.client.local_servers_test import servers_of
from tests.runtime.served import Served


@pytest.mark.slow
@pytest.mark.parametrize("num_pods", [2, 3, 4])
def test_pods_in_all_three_places_hold_the_same_bits_for_200_steps(
  num_pods, corpus, tmp_path
):
  """Pods are compared after every step, and the three places at the end."""

  def train(place, **macros):
    process = runs.start(
      "train",
      corpus,
      tmp_path / place,
      NUM_PODS=num_pods,
      PODS=place,
      GLOBAL_BATCH_SIZE=12,
      ACTIVATION_DTYPE="bfloat16",
      DCN_DTYPE="bfloat16",
      FINGERPRINT_STEPS=1,
      TRAIN_STEPS=200,
      CHECKPOINT_STEPS=200,
      EVAL_STEPS=200,
      PROMPTS=[],
      **macros,
    )
    runs.finish(process)

  train("in_process")
  train("local_servers")
  with Served(num_pods, len(cores_of_pods(num_pods)[0])) as servers:
    train("cluster", ISLANDS=servers.islands)
  for place in ("local_servers", "cluster"):
    runs.assert_same_tensors(tmp_path / "in_process", tmp_path / place, 200)
  names = runs.read_tensors(tmp_path / "in_process", 200)
  assert any(name.endswith("/momentum") for name in names)


@pytest.mark.parametrize("has_native", [True, slow(False)])
def test_where_one_server_lacks_what_we_compile_all_do_without(has_native):
  """Otherwise pods would compute different bits."""
  servers = [start_server(1, 1) for _ in range(2)]
  addresses = [x.target.removeprefix("grpc://") for x in servers]
  places = [[Place(x, 0)] for x in addresses]
  infos = {x: read_info(x, 5.0) for x in addresses}
  last = infos[addresses[1]]
  assert last.has_native == (operations() is not None)
  has_native = has_native and last.has_native
  infos[addresses[1]] = dataclasses.replace(last, has_native=has_native)
  pods = PodsConfig(num_pods=2, pods="local_servers")
  mesh = MeshLayout(mesh_shape="", layout="")
  cluster = connect.connect(HostStarter(), pods, mesh, places, infos)
  expected = last.num_threads if has_native else 0
  assert cluster.devices.native_threads == expected


def resident_bytes_of(pid):
  """Returns the resident bytes of a process, as ps(1) shows."""
  with open(f"/proc/{pid}/statm", encoding="ascii") as file:
    return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_pod_has_the_number_of_its_largest_server():
  tasks = ["pod_0/replica:0/task:0", "pod_0/task:1", "pod_1/task:0"]
  servers = [Process(f"/job:{x}/device:cpu:0") for x in tasks]

  def call(program):
    assert [len(x) for x in program.outputs.values()] == [2, 1]
    found = [np.int64(5), np.int64(9)], [np.int64(7)]
    return dict(zip(program.outputs, found, strict=True))

  client = types.SimpleNamespace(graph=tf.Graph(), call=call)
  assert memory_reader(client, servers)() == {
    "host_memory_bytes/pod_0": 9,
    "host_memory_bytes/pod_1": 7,
  }


@pytest.mark.slow
def test_every_line_has_the_memory_of_each_server_and_a_lost_one_is_named(
  corpus, tmp_path, monkeypatch, capsys
):
  seen, lost = [], []

  def read(real):
    pids = servers_of(os.getpid())
    before = [*map(resident_bytes_of, pids)]
    if len(seen) == 3:
      wait_for((tmp_path / "checkpoints" / "step_00000002").exists)
      os.kill(pids[1], signal.SIGKILL)
      lost.append((time.monotonic(), pids))
    found = real()
    seen.append((found, before, [*map(resident_bytes_of, pids)]))
    return found

  monkeypatch.setattr(
    session,
    "memory_reader",
    lambda *arguments: functools.partial(read, memory_reader(*arguments)),
  )
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
    # A server that writes a checkpoint may free memory between the readings.
    for size, *sizes in zip(found.values(), before, after, strict=True):
      assert 0.98 * min(sizes) < size < 1.02 * max(sizes)
    assert line["host_memory_bytes"] not in found.values()
  error = capsys.readouterr().err
  assert "DAMAGED" not in error
  line = error.splitlines()[-1]
  assert re.fullmatch(
    rf"palm_mtf: pod 1: its server 127\.0\.0\.1:\d+ \(process {pids[1]}\) was "
    r"killed by SIGKILL, while its memory was read after step 4; run the same "
    r"command to resume\.",
    line,
  ), line
