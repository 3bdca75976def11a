# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Pods in separate processes compute the same bits; none outlives a run."""

import contextlib
import os
import pathlib
import shutil
import subprocess

import pytest

from palm_mtf.config import PodsConfig
from palm_mtf.errors import UserError
from palm_mtf.runtime.client.local_servers import PodServers, cores_of_pods
from tests import processes, runs
from tests.mtf_testing import SINGLE

LOCAL_SERVERS = PodsConfig(num_pods=2, pods="local_servers")


# Slow: recovery_test.py compares the bits too, of a run that loses a server.
@pytest.mark.slow
@pytest.mark.parametrize(
  "macros",
  [
    # A ramp makes a second session on the same servers, which restores.
    {"NUM_MICROBATCHES": 2, "GLOBAL_BATCH_SIZE": [[0, 4], [3, 8]]},
    {"MESH_SHAPE": "data:2", "LAYOUT": "batch:data", "DCN_DTYPE": "bfloat16"},
  ],
  ids=["ramp", "split"],
)
def test_servers_train_the_bits_that_this_process_would_and_leave_no_file(
  macros, corpus, tmp_path, monkeypatch
):
  (tmp_path / "temporary").mkdir()
  monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
  settings = {"NUM_PODS": 2, "TRAIN_STEPS": 4, "PROMPTS": [], **macros}
  here, servers = tmp_path / "here", tmp_path / "servers"
  assert runs.run("train", corpus, here, **settings, PODS="in_process") == 0
  settings["PODS"] = "local_servers"
  error = runs.finish(runs.start("train", corpus, servers, **settings))
  # Servers on one machine share files, so they read and write themselves.
  assert "for all servers" not in error
  runs.assert_same_tensors(here, servers, 4)
  assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.slow
def test_servers_hear_loopback_alone_and_are_stopped():
  with PodServers(LOCAL_SERVERS, SINGLE) as servers:
    addresses = [place.address for (place,) in servers.places()]
    for address in addresses if shutil.which("ss") else []:
      command = ["ss", "-Hltn", f"sport = :{address.rpartition(':')[2]}"]
      (line,) = subprocess.check_output(command, text=True).splitlines()
      assert "%lo:" in line
    processes = [each.process for each in servers._servers]
    cores = [os.sched_getaffinity(process.pid) for process in processes]
  assert len(set(addresses)) == 2
  if len(os.sched_getaffinity(0)) > 1:
    assert not cores[0] & cores[1] and len(cores[0]) == len(cores[1])
  assert [process.returncode for process in processes] == [0, 0]


def test_a_server_that_ends_is_named():
  with PodServers(PodsConfig(pods="local_servers"), SINGLE) as servers:
    (server,) = servers._servers
    server.process.kill()
    with pytest.raises(UserError) as error:
      servers.places()
  assert str(error.value) == (
    f"pod 0: its server (process {server.process.pid}) was killed by SIGKILL, "
    "at its start."
  )


def servers_of(client):
  """Returns the process ids of the servers that `client` has started."""
  children = []
  for path in pathlib.Path(f"/proc/{client}/task").glob("*/children"):
    with contextlib.suppress(OSError):  # this thread of the client has ended
      children += map(int, path.read_text().split())
  commands = {x: pathlib.Path(f"/proc/{x}/cmdline") for x in sorted(children)}
  module = "palm_mtf.runtime.server.process"
  return [x for x, path in commands.items() if module in path.read_text()]


@pytest.mark.slow
def test_a_killed_client_leaves_no_server(corpus, tmp_path):
  settings = {"NUM_PODS": 2, "PODS": "local_servers", "LOG_STEPS": 1}
  settings["TRAIN_STEPS"] = 100_000
  process = runs.start("train", corpus, tmp_path, **settings)
  processes.wait_until((tmp_path / "metrics.jsonl").exists, process)
  pids = servers_of(process.pid)
  assert len(pids) == 2
  process.kill()
  process.communicate()
  processes.wait_for(lambda: not any(map(processes.is_running, pids)))


def test_cores_are_divided_equally(monkeypatch):
  for cores, expected in (
    ({4}, [[4], [4], [4]]),
    ({1, 2, 3, 5, 6, 7, 8}, [[1, 2], [3, 5], [6, 7]]),
  ):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _, c=cores: c)
    assert cores_of_pods(3) == expected
