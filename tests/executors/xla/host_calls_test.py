# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a user reads if JAX does not start, or fails on a device."""

import itertools
import re
import socket
import types

import jax
import pytest

from palm_mtf._tf import tf
from palm_mtf.cli.main import main
from palm_mtf.config import MeshLayout, PodsConfig
from palm_mtf.errors import UserError
from palm_mtf.executors.xla import devices, pod_arrays, start_hosts
from palm_mtf.executors.xla.devices import find_devices
from palm_mtf.executors.xla.executor import EXECUTOR
from palm_mtf.executors.xla.host_calls import (
  POD_FUNCTIONS,
  CoordinatorSettings,
  HostSettings,
  call_pod,
  check_host,
  name_of,
  open_coordinator,
  start_host,
)
from palm_mtf.json_text import dataclass_text
from palm_mtf.runtime.client.connect import connect
from palm_mtf.runtime.client.heartbeat import Heartbeat
from palm_mtf.runtime.client.local_servers import PodServers
from palm_mtf.runtime.client.places import Place
from palm_mtf.runtime.program import Program
from palm_mtf.runtime.server.start import start_server
from tests import runs

MESH = MeshLayout(mesh_shape="data:4", layout="batch:data", tpu="v4-8")
OUT_OF_MEMORY = (
  r"RESOURCE_EXHAUSTED: .+; raise NUM_MICROBATCHES, lower GLOBAL_BATCH_SIZE or "
  r"take a larger mesh; `palm_mtf plan --compile` shows the memory\."
)


def exhaust_memory(*unused):
  return jax.numpy.zeros(2**55).block_until_ready()


def test_training_ends_with_one_line_and_its_checkpoint_is_whole(
  corpus, tmp_path, capsys, monkeypatch
):
  run_steps, calls = pod_arrays.run_steps, itertools.count(1)

  def fail_in_step_2(*inputs):
    return (exhaust_memory if next(calls) == 2 else run_steps)(*inputs)

  name = name_of(run_steps)
  monkeypatch.setitem(POD_FUNCTIONS, name, fail_in_step_2)
  settings = {"TPU": "v4-8", "MESH_SHAPE": "data:4", "LAYOUT": "batch:data"}
  settings |= {"CHECKPOINT_STEPS": 1, "PROMPTS": []}
  assert runs.run("train", corpus, tmp_path, **settings) == 2
  error = capsys.readouterr().err
  assert "Traceback" not in error
  assert re.fullmatch(
    rf"palm_mtf: this machine: JAX failed in run_steps, in step 2: "
    rf"{OUT_OF_MEMORY}",
    error.splitlines()[-1],
  ), error
  assert main(["checkpoints", "verify", str(tmp_path)]) == 0
  assert (tmp_path / "checkpoints/step_00000001").exists()


def end_connection(*unused):
  raise jax.errors.JaxRuntimeError("UNAVAILABLE: Connection closed.\n at x.cc")


@pytest.mark.parametrize(
  ("fails", "line"),
  [
    (exhaust_memory, OUT_OF_MEMORY),
    (
      end_connection,
      "UNAVAILABLE: Connection closed; run the same command again; training "
      r"resumes from the newest checkpoint\.",
    ),
  ],
)
def test_the_server_whose_device_fails_is_named(fails, line, monkeypatch):
  monkeypatch.setitem(POD_FUNCTIONS, "pod_arrays.fails", fails)
  address = start_server(1, 1).target.removeprefix("grpc://")
  pods = PodsConfig(num_pods=1, pods="cluster", islands=[[address]])
  with PodServers(pods, MESH) as servers:
    places = EXECUTOR.find_places(servers.places())
    heartbeat = Heartbeat(servers, places, 5.0, EXECUTOR)
    cluster = connect(EXECUTOR, pods, MESH, places, heartbeat.infos)
  (process,) = cluster.servers
  with cluster.client() as client:
    with client.graph.as_default():
      called = process.call(call_pod, ["pod_arrays.fails"], [tf.int32])
    with pytest.raises(UserError) as error, heartbeat.during("in step 3"):
      client.call(Program(outputs=called))
  assert re.fullmatch(
    rf"pod 0: its server {address}: JAX failed in fails, in step 3: {line}",
    str(error.value),
  )


def test_a_server_on_which_jax_does_not_start_in_time_is_named(monkeypatch):
  monkeypatch.setattr(start_hosts, "_START_SECS", 0.5)
  with socket.create_server(("127.0.0.1", 0)) as silent:
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    info = types.SimpleNamespace(functions={"start_host": "pyfunc_0"})
    pods = PodsConfig(num_pods=1, pods="local_servers")
    with pytest.raises(UserError) as error:
      connect(EXECUTOR, pods, MESH, [[Place(address, 0)]], {address: info})
  assert str(error.value).startswith(
    f"pod 0: the server {address}: has not answered for 0.5 seconds, while JAX "
    "started; maybe another process there holds the accelerators"
  )


def join(coordinator):
  """Returns the settings of the second of two hosts."""
  counts = {"number": 1, "num_hosts": 2, "num_stages": 1}
  return HostSettings(mesh_layout=MESH, coordinator=coordinator, **counts)


def test_why_jax_does_not_join_the_hosts_of_a_pod_is_one_line(monkeypatch):
  monkeypatch.setattr(devices, "_started", None)
  jax.devices("cpu")  # JAX joins hosts only before it finds devices
  found = start_host(dataclass_text(join("192.0.2.1:1")).encode()).decode()
  assert re.fullmatch(
    r"JAX does not start \(.*initialize.*\); start its server again\.", found
  )


@pytest.mark.parametrize(
  ("port", "num_hosts", "found"),
  [
    (0, 2, "2222"),
    (2222, 2, "2222"),
    (
      2300,
      2,
      "its coordinator listens at port 2222, and COORDINATOR_PORT asks for "
      "2300; start its server again.",
    ),
    (
      0,
      3,
      "it coordinates 2 hosts and cannot coordinate 3; start its server again.",
    ),
  ],
)
def test_a_server_has_one_coordinator(port, num_hosts, found, monkeypatch):
  monkeypatch.setattr(devices, "_coordinator", (None, 2222, 2))
  wanted = CoordinatorSettings(host="127.0.0.1", port=port, num_hosts=num_hosts)
  assert open_coordinator(dataclass_text(wanted).encode()).decode() == found


def test_a_server_that_was_another_host_gets_no_coordinator(monkeypatch):
  """Its thread would restrict the guards of the coordinator's port."""
  monkeypatch.setattr(devices, "_coordinator", None)
  monkeypatch.setattr(devices, "_started", (1, 2))
  wanted = CoordinatorSettings(host="127.0.0.1", port=0, num_hosts=2)
  assert open_coordinator(dataclass_text(wanted).encode()).decode() == (
    "it was host 1 of 2 and cannot become host 0 of 2; start its server again."
  )


@pytest.mark.parametrize(
  ("started", "found"),
  [
    (None, "new"),
    ((1, 2), "joined"),
    (
      (0, 1),
      "it was host 0 of 1 and cannot become host 1 of 2; start its server "
      "again.",
    ),
  ],
)
def test_a_server_is_asked_whether_it_can_join_a_pod(
  started, found, monkeypatch
):
  """JAX ends the other hosts if one host cannot start."""
  monkeypatch.setattr(devices, "_started", started)
  monkeypatch.setattr(devices, "_joined", "127.0.0.1:5000")
  given = dataclass_text(join("127.0.0.1:5000")).encode()
  assert check_host(given).decode() == found


@pytest.mark.parametrize("function", [check_host, start_host])
def test_a_server_that_has_joined_other_hosts_is_refused(function, monkeypatch):
  """Else the hosts of two stages would wait for each other without end."""
  monkeypatch.setattr(devices, "_started", (1, 2))
  monkeypatch.setattr(devices, "_joined", "127.0.0.1:4000")
  given = dataclass_text(join("127.0.0.1:5000")).encode()
  assert function(given).decode() == (
    "it has joined the hosts of 127.0.0.1:4000 and cannot join those of "
    "127.0.0.1:5000; start its server again."
  )


def test_jax_of_another_version_is_refused(monkeypatch):
  monkeypatch.setattr(jax, "__version__", "0.9.1")
  with pytest.raises(UserError) as error:
    find_devices(MESH)
  assert str(error.value) == (
    "JAX 0.9.1: palm_mtf computes on accelerators with JAX 0.10.x; pip install "
    "'jax==0.10.*'"
  )
