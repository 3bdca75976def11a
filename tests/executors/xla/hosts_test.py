# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Pods of accelerators in separate processes: bits, resumes, lost servers.

Virtual CPU devices take the place of accelerators. JAX joins a pod's hosts.
"""

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from tests import processes, runs
from tests.processes import wait_until
from tests.runtime.intrusion import NOBODY, Intruder, free_ports
from tests.runtime.served import Served

pytestmark = pytest.mark.slow

SETTINGS = {
  "TPU": "v4-8",
  "MESH_SHAPE": "data:2,model:2",
  "LAYOUT": "batch:data,heads:model,d_ff:model,d_model_stored:data",
  "NUM_PODS": 2,
  "FINGERPRINT_STEPS": 1,
  "CHECKPOINT_STEPS": 4,
  "PROMPTS": [],
}


def last_error(corpus, model_dir, **settings):
  """Returns the line that a run prints which cannot start."""
  client = runs.start("train", corpus, model_dir, **settings)
  _, error = client.communicate(timeout=120)
  assert client.returncode == 2, error
  return error.splitlines()[-1]


def train(corpus, model_dir, **macros):
  settings = {**SETTINGS, **macros}
  runs.finish(runs.start("train", corpus, model_dir, **settings))


def assert_near(folder, expected, step):
  found, tensors = (runs.read_tensors(x, step) for x in (folder, expected))
  assert found.keys() == tensors.keys()
  for name, value in tensors.items():
    np.testing.assert_allclose(found[name], value, 1e-3, 1e-4, err_msg=name)


def test_servers_of_pods_train_the_bits_of_one_process_also_after_a_kill(
  corpus, tmp_path
):
  here, served = tmp_path / "in_process", tmp_path / "local_servers"
  train(corpus, here, TRAIN_STEPS=8)
  endless = {**SETTINGS, "TRAIN_STEPS": 10**6, "PODS": "local_servers"}
  client = runs.start("train", corpus, served, **endless)
  step = served / "checkpoints/step_00000004"
  wait_until(step.exists, client)
  client.kill()
  client.communicate()
  for newer in (served / "checkpoints").glob("step_*"):
    assert newer == step, "the run was killed too late for this test"
  train(corpus, served, TRAIN_STEPS=8, PODS="local_servers")
  runs.assert_same_tensors(here, served, 8)


def test_pods_of_two_hosts_train_what_one_process_does_for_two_clients(
  corpus, tmp_path
):
  """The second client resumes on the same servers."""
  here, there = tmp_path / "in_process", tmp_path / "cluster"
  train(corpus, here, TRAIN_STEPS=8)
  with Served(4, variables={"JAX_PLATFORMS": "cpu"}) as servers:
    islands = [servers.addresses[:2], servers.addresses[2:]]
    cluster = {"PODS": "cluster", "ISLANDS": islands}
    for steps in (4, 8):
      train(corpus, there, TRAIN_STEPS=steps, **cluster)
  assert_near(there, here, 8)


STAGES = {"NUM_LAYERS": 2, "STAGES": 2, "NUM_MICROBATCHES": 2, "NUM_PODS": 1}


@pytest.mark.parametrize("num_servers", [1, 2])
def test_stages_on_servers_train_the_bits_of_one_process(
  corpus, tmp_path, num_servers
):
  """One server has both stages, or each stage has a server."""
  here, there = tmp_path / "in_process", tmp_path / "cluster"
  train(corpus, here, TRAIN_STEPS=8, **STAGES)
  with Served(num_servers, variables={"JAX_PLATFORMS": "cpu"}) as servers:
    cluster = {"PODS": "cluster", "ISLANDS": [servers.addresses]}
    for steps in (4, 8):
      train(corpus, there, TRAIN_STEPS=steps, **STAGES, **cluster)
  runs.assert_same_tensors(here, there, 8)


def test_two_pods_in_stages_resume_on_other_hosts_and_as_whole_pods(
  corpus, tmp_path
):
  """Each stage of the first client has two hosts."""
  here, there = tmp_path / "in_process", tmp_path / "cluster"
  stages = {**STAGES, "NUM_PODS": 2, "GLOBAL_BATCH_SIZE": 8}
  train(corpus, here, TRAIN_STEPS=12, **stages)
  with Served(8, variables={"JAX_PLATFORMS": "cpu"}) as servers:
    islands = [servers.addresses[:4], servers.addresses[4:]]
    cluster = {"PODS": "cluster", "ISLANDS": islands}
    train(corpus, there, TRAIN_STEPS=4, **stages, **cluster)
  train(corpus, there, TRAIN_STEPS=8, **{**stages, "PODS": "local_servers"})
  train(corpus, there, TRAIN_STEPS=12, **{**stages, "STAGES": 1})
  assert_near(there, here, 12)


def answers(model_dir, **macros):
  """Returns what the commands print about a trained run."""
  flags = [f"--gin.{name}={value!r}" for name, value in macros.items()]
  given = ["--model_dir", str(model_dir), *flags, "--json"]
  commands = [
    ["generate", "--prompt", "seven eight", "--gin.TEMPERATURE=0.0"],
    ["score", "--text", "seven eight nine ten"],
    ["evaluate"],
  ]
  found = []
  for command in commands:
    process = processes.start("-m", "palm_mtf", *command, *given)
    output, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    found.append(json.loads(output.splitlines()[-1]))
  return found


@pytest.mark.parametrize(
  ("num_servers", "stages"),
  [(2, {}), (4, {"NUM_LAYERS": 2, "STAGES": 2, "NUM_MICROBATCHES": 2})],
)
def test_a_pod_of_two_hosts_generates_scores_and_evaluates_as_a_cpu_does(
  corpus, tmp_path, num_servers, stages
):
  """Of a pod with stages, the two hosts of one stage do so."""
  train(corpus, tmp_path, TRAIN_STEPS=40, NUM_PODS=1, **stages)
  generated, scored, evaluated = answers(
    tmp_path, TPU="", MESH_SHAPE="data:1", LAYOUT=""
  )
  with Served(num_servers, variables={"JAX_PLATFORMS": "cpu"}) as servers:
    cluster = {"PODS": "cluster", "ISLANDS": [servers.addresses]}
    found = answers(tmp_path, **cluster)
    for process in servers.processes:
      assert process.poll() is None
  assert found[0] == generated
  for name, of_pod, of_cpu in (
    ("log_likelihood", found[1], scored),
    ("validation_loss", found[2], evaluated),
  ):
    assert of_pod[name] == pytest.approx(of_cpu[name], rel=1e-5)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_server_is_named_and_the_run_resumes(corpus, tmp_path, number):
  model_dir = tmp_path / "run"
  variables = {"JAX_PLATFORMS": "cpu"}
  settings = {**SETTINGS, "PODS": "cluster", "POD_TIMEOUT_SECS": 4.0}
  with Served(2, variables=variables) as servers:
    endless = {**settings, "TRAIN_STEPS": 10**6, "ISLANDS": servers.islands}
    client = runs.start("train", corpus, model_dir, **endless)
    step = model_dir / "checkpoints/step_00000004"
    wait_until(step.exists, client)
    servers.processes[1].send_signal(number)
    _, error = client.communicate(timeout=60)
    assert client.returncode == 2, error
    assert re.match(
      f"palm_mtf: pod 1: its server {servers.addresses[1]} has not answered "
      "for 4 seconds,",
      error.splitlines()[-1],
    ), error
  with Served(2, variables=variables) as servers:
    newest = max((model_dir / "checkpoints").glob("step_*"))
    steps = int(newest.name.removeprefix("step_")) + 4
    settings |= {"TRAIN_STEPS": steps, "ISLANDS": servers.islands}
    train(corpus, model_dir, **settings)


def test_a_server_that_was_a_pod_alone_is_named_and_others_stay_alive(
  corpus, tmp_path
):
  """JAX ends the hosts of a pod if one of them cannot start."""
  settings = {"NUM_PODS": 1, "PODS": "cluster"}
  with Served(2, variables={"JAX_PLATFORMS": "cpu"}) as servers:
    first, second = servers.addresses
    train(corpus, tmp_path, TRAIN_STEPS=4, **settings, ISLANDS=[[first]])
    joined = {**SETTINGS, **settings, "ISLANDS": [[second, first]]}
    assert last_error(corpus, tmp_path, **joined, TRAIN_STEPS=8) == (
      f"palm_mtf: pod 0: the server {first}: it was host 0 of 1 and cannot "
      "become host 1 of 2; start its server again."
    )
    train(corpus, tmp_path, TRAIN_STEPS=8, **settings, ISLANDS=[[second]])


def test_a_new_server_and_one_of_another_run_are_refused_and_stay_alive(
  corpus, tmp_path
):
  """JAX would end the servers of the other run, which may be training."""
  settings = {"NUM_PODS": 1, "PODS": "cluster"}
  with Served(3, variables={"JAX_PLATFORMS": "cpu"}) as servers:
    first, second, third = servers.addresses
    pod = [[first, second]]
    train(corpus, tmp_path, TRAIN_STEPS=4, **settings, ISLANDS=pod)
    mixed = {**SETTINGS, **settings, "ISLANDS": [[first, third]]}
    assert last_error(corpus, tmp_path, **mixed, TRAIN_STEPS=8) == (
      f"palm_mtf: pod 0: the server {first} was a host of another run, and "
      f"{third} was not, so they cannot join; start all servers of this pod "
      "again."
    )
    train(corpus, tmp_path, TRAIN_STEPS=8, **settings, ISLANDS=pod)


def test_a_server_without_accelerators_ends_the_run_at_its_start(
  corpus, tmp_path
):
  with Served(2, variables={"JAX_PLATFORMS": ""}) as servers:
    settings = {**SETTINGS, "PODS": "cluster", "ISLANDS": servers.islands}
    line = last_error(corpus, tmp_path, **settings, TRAIN_STEPS=4)
  assert line.startswith(
    f'palm_mtf: pod 0: the server {servers.addresses[0]}: TPU = "v4-8": JAX '
    "finds no TPU on this machine ("
  )


def listening_ports(pid):
  """Returns the TCP ports on which a process listens."""
  sockets = set()
  for path in Path(f"/proc/{pid}/fd").iterdir():
    with contextlib.suppress(OSError):
      sockets.add(os.readlink(path))
  ports = set()
  for table in ("/proc/net/tcp", "/proc/net/tcp6"):
    for line in Path(table).read_text().splitlines()[1:]:
      _, near, _, state, *rest = line.split()
      if state == "0A" and f"socket:[{rest[5]}]" in sockets:
        ports.add(int(near.rpartition(":")[2], 16))
  return ports


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_no_socket_of_hosts_and_client_answers_another_user(corpus, tmp_path):
  (named,) = free_ports(1)
  with (
    Intruder(NOBODY) as intruder,
    Served(2, variables={"JAX_PLATFORMS": "cpu"}) as servers,
  ):
    pods = {"NUM_PODS": 1, "PODS": "cluster", "ISLANDS": [servers.addresses]}
    settings = {**SETTINGS, **pods, "COORDINATOR_PORT": named}
    settings["TRAIN_STEPS"] = 10**6
    client = runs.start("train", corpus, tmp_path, **settings)
    wait_until((tmp_path / "checkpoints/step_00000008").exists, client)
    of_servers = [listening_ports(x.pid) for x in servers.processes]
    ports = set().union(*of_servers, listening_ports(client.pid))
    # Two servers, the client's server, the coordinator and JAX's collectives.
    assert len(ports) >= 6
    assert named in of_servers[0]
    # The last connection to each of them was cut.
    intruder.wait_for(*(f"cut 127.0.0.1:{port}" for port in ports))
    client.send_signal(signal.SIGTERM)
    client.communicate(timeout=120)
  # Other processes of this machine may answer.
  assert not {f"127.0.0.1:{x}" for x in ports}.intersection(intruder.answered())
