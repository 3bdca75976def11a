# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""ISLANDS gives each pod its devices, or is refused with its text."""

import dataclasses
import functools
import json
import signal
import time

import numpy as np
import pytest

from palm_mtf import runtime
from palm_mtf.cli.main import main
from palm_mtf.commands.pods import join_manager
from palm_mtf.config import MeshLayout, PodsConfig
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.errors import UserError
from palm_mtf.runtime.client.local_servers import PodServers
from palm_mtf.runtime.client.places import (
  Place,
  check_slices,
  places_of_pods,
  resolve_places,
)
from palm_mtf.runtime.manager.service import serve
from palm_mtf.runtime.server import start
from palm_mtf.runtime.server.start import start_server
from tests import runs
from tests.commands.pods_test import Processes
from tests.mtf_testing import SINGLE
from tests.processes import wait_for
from tests.refusals import message_of
from tests.runtime.manager.service_test import (
  connect,
  register,
  tensorflow_address,
)
from tests.training.supervisor_test import SETTINGS, resumed_step, train

MESH = MeshLayout(mesh_shape="data:2,model:2", layout="batch:data,d_ff:model")


def places(*islands, mesh=MESH):
  pods = PodsConfig(num_pods=len(islands), pods="cluster", islands=islands)
  return places_of_pods(pods, mesh)


def test_devices_are_in_mesh_order_and_shared_equally_where_unnamed():
  assert places(["a:1", "b:2"], ["c:3/0,4-5,2"]) == [
    [Place("a:1", 0), Place("a:1", 1), Place("b:2", 0), Place("b:2", 1)],
    [Place("c:3", 0), Place("c:3", 4), Place("c:3", 5), Place("c:3", 2)],
  ]


@pytest.mark.parametrize(
  ("islands", "message"),
  [
    (
      [["a:1"], ["b:1/0-1", "c:1/0"]],
      "ISLANDS: pod 1 has 2 + 1 = 3 devices and needs 2 x 2 = 4 (MESH_SHAPE = "
      '"data:2,model:2"); give as many as the pod needs.',
    ),
    (
      [["a:1", "b:1", "c:1"]],
      'ISLANDS: pod 0 needs 2 x 2 = 4 devices (MESH_SHAPE = "data:2,model:2"), '
      "which 3 servers cannot share equally; name the devices of each server, "
      'as in "host:2222/0-1".',
    ),
    (
      [["a:1/0-1", "a:1/1-2"]],
      "ISLANDS: device 1 of a:1 is given 2 times; give each device once.",
    ),
    (
      [["a:1/0-3"], ["a:1/4-7"]],
      "ISLANDS: a:1 is in pods 0 and 1; start a server for each pod.",
    ),
    *[
      (
        [["a:1"], [entry]],
        f'ISLANDS: pod 1 has {entry!r}: write "host:port", the port from 1 to '
        '65535, or with its devices "host:port/0-3".',
      )
      for entry in ("b", "b:70000", "b:\u0661", "b:1/\u0660")
    ],
  ],
)
def test_an_impossible_table_is_refused_with_the_arithmetic(islands, message):
  assert message_of(places, *islands) == message


def test_names_become_the_addresses_that_all_hosts_share():
  places = [[Place("localhost:5", 1)], [Place("127.0.0.1:6", 0)]]
  assert resolve_places(places, "localhost") == [
    [Place("127.0.0.1:5", 1)],
    [Place("127.0.0.1:6", 0)],
  ]


def test_a_name_that_is_loopback_here_alone_is_refused():
  places = [[Place("localhost:5", 0)], [Place("192.0.2.1:5", 0)]]
  assert message_of(resolve_places, places, "192.0.2.9") == (
    'ISLANDS: "localhost:5" is 127.0.0.1 on this host, which "192.0.2.1:5" '
    "cannot reach; give an address that all hosts reach."
  )
  assert message_of(resolve_places, places[1:], "localhost") == (
    'CLIENT_ADDRESS = "localhost" is 127.0.0.1, which "192.0.2.1:5" cannot '
    "reach; give an address of this host that all servers reach."
  )


def test_a_pods_servers_have_its_stages_one_after_another():
  mesh = MeshLayout(mesh_shape="data:2", layout="batch:data", stages=2)
  assert places(["a:1", "b:2"], ["c:3/4-7"], mesh=mesh) == [
    [Place("a:1", 0), Place("a:1", 1), Place("b:2", 0), Place("b:2", 1)],
    [Place("c:3", 4), Place("c:3", 5), Place("c:3", 6), Place("c:3", 7)],
  ]
  assert message_of(places, ["a:1/0", "b:2/0"], mesh=mesh) == (
    "ISLANDS: pod 0 has 1 + 1 = 2 devices and needs 2 x 2 = 4 (MESH_SHAPE = "
    '"data:2", STAGES = 2); give as many as the pod needs.'
  )


TWO = MeshLayout(mesh_shape="data:2", layout="batch:data")


@pytest.fixture
def pods(tmp_path):
  """Settings of a pod, and a manager of one server with two devices."""
  with serve("127.0.0.1", 0, str(tmp_path / "state"), "") as port:
    manager = f"127.0.0.1:{port}"
    yield PodsConfig(pods="cluster", islands="auto", manager=manager)


def join(pods):
  """Registers a server of this process as one of this version."""
  client = connect(pods.manager.partition(":")[2])
  join_manager(client, tensorflow_address(), "main")
  return client


def test_a_pod_has_the_devices_of_its_mesh_until_the_run_ends(pods):
  with join(pods) as client:
    check_slices(pods, TWO)
    with PodServers(pods, TWO) as servers:
      address = tensorflow_address()
      assert servers.places() == [[(address, 0), (address, 1)]]
      assert servers.places() == [[(address, 0), (address, 1)]]
      (owner,) = client.call("list_all")[0]["owners"]
      assert owner
    assert client.call("list_all")[0]["owners"] == []


def test_a_client_has_slices_of_several_shapes_on_islands_as_it_asks(pods):
  total = runtime.function(lambda x: runtime.all_sum(x))
  with join(pods) as client:
    other = start_server(1, 1).target.removeprefix("grpc://")
    join_manager(client, other, "east")
    asked = functools.partial(runtime.connect_managed, pods.manager, ["2", "1"])
    with asked(islands="apart", device_bytes=10**6, share=2.0) as traced:
      (allocation,) = (x for x in client.call("list_all") if "wish" in x)
      assert allocation["wish"]["device_bytes"] == 10**6
      assert allocation["places"][1] == [[other, 0]]
      b, a = traced.slices("1", "2")
      assert [*a.devices, *b.devices] == traced.devices
      found = total.on(b)(total.on(a)(np.arange(4.0)))
      np.testing.assert_array_equal(found.fetch(), [2, 4, 2, 4])
    assert client.call("list_all")[0]["owners"] == []


def test_a_run_that_shrinks_avoids_the_servers_of_the_lost_pod(pods):
  with join(pods) as client:
    other = start_server(2, 1).target.removeprefix("grpc://")
    join_manager(client, other, "main")
    both = dataclasses.replace(pods, num_pods=2)
    with PodServers(both, TWO) as servers:
      hosts = [places[0].address for places in servers.places()]
      assert {*hosts} == {tensorflow_address(), other}
      assert servers.remove(0).islands == "auto"
      assert servers.places() == [[(hosts[1], 0), (hosts[1], 1)]]


def test_pods_that_no_island_can_hold_are_refused_before_a_run(pods):
  four = DeviceMesh(mesh_shape="data:2,model:2", layout="")
  with join(pods), pytest.raises(UserError) as error:
    check_slices(pods, four)
  assert str(error.value) == (
    'no island can hold the slice "2x2" (4 devices): the largest that fits is '
    '"2x1"; ask for that, or start more servers (`palm_mtf pods serve '
    "--manager`)."
  )


def test_a_run_asks_for_the_memory_of_its_plan_before_it_reads_data(
  pods, tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(start, "memory_bytes", lambda: (10**6, 2 * 10**5))
  address = start.start_server(2, 1).target.removeprefix("grpc://")
  with connect(pods.manager.partition(":")[2]) as client:
    join_manager(client, address, "main")
    settings = {"PODS": "cluster", "MANAGER": pods.manager, "ISLANDS": "same"}
    settings |= {"NUM_LAYERS": 4, "STAGES": 2, "NUM_MICROBATCHES": 2}
    arguments = runs.arguments("plan", None, tmp_path, **settings)
    assert main([*arguments, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["device_bytes"]
    needed = sum(planned.values())
    for macros, rest in (
      ({}, f"each of {needed:,} bytes): no server has such a device"),
      ({"DEVICE_BYTES": 0}, "each): there is room for 1; ask for that"),
    ):
      assert runs.run("train", None, tmp_path, **settings, **macros) == 2
      line = f'palm_mtf: no island can hold the 2 slices "1" (1 devices {rest}'
      assert line in capsys.readouterr().err


def test_a_server_of_another_version_is_no_place_for_a_run(pods):
  with connect(pods.manager.partition(":")[2]) as client:
    register(client, tensorflow_address(), 2)
    with pytest.raises(UserError, match="no server has such a device"):
      check_slices(pods, SINGLE)


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    (
      {"pods": "cluster", "islands": "atuo"},
      "ISLANDS = 'atuo' (did you mean \"auto\"?): choose one of 'auto', "
      "'same', 'apart'.",
    ),
    (
      {"pods": "cluster", "islands": "auto"},
      'MANAGER = "", ISLANDS = \'auto\' and PODS = "cluster": for servers that '
      'a manager chooses, set MANAGER = "host:port", ISLANDS = "auto" and PODS '
      '= "cluster"; else drop MANAGER.',
    ),
    (
      {"manager": "a:1"},
      'MANAGER = "a:1", ISLANDS = () and PODS = "in_process": for servers that '
      'a manager chooses, set MANAGER = "host:port", ISLANDS = "auto" and PODS '
      '= "cluster"; else drop MANAGER.',
    ),
  ],
)
def test_settings_that_contradict_each_other_are_one_line(settings, message):
  assert message_of(PodsConfig, **settings) == message


def newest_step(model_dir):
  folders = (model_dir / "checkpoints").glob("step_*")
  return max((int(x.name.removeprefix("step_")) for x in folders), default=0)


@pytest.mark.slow
def test_a_run_outlives_its_manager_and_leaves_a_drained_server(
  corpus, tmp_path
):
  disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
  with Processes(tmp_path) as pods:
    servers = dict(pods.serve()[::-1] for _ in range(4))
    managed = {"PODS": "cluster", "ISLANDS": "auto", "MANAGER": pods.address}
    managed["ON_POD_FAILURE"] = "wait"

    def in_use():
      return [x["address"] for x in pods.list_all() if x.get("owners")]

    def wait_for_two(client, left):
      while len(used := in_use()) != 2 or left & {*used}:
        assert client.poll() is None, "the run has ended before it has moved"
        time.sleep(0.1)
      return used

    def disturb(client):
      pods.manager.kill()
      pods.manager.wait()
      pods.manager = pods.manage()
      pods.wait_for(dict.fromkeys(servers, "serving"))
      lost, _ = in_use()
      servers[lost].send_signal(signal.SIGKILL)
      drained, _ = wait_for_two(client, {lost})
      with connect(pods.address.partition(":")[2]) as manager:
        manager.call("drain", address=drained, is_drained=True)
      wait_for_two(client, {lost, drained})

    # The new manager needs seconds until it knows the servers, so the run is
    # long. The test stops the run when it has trained on its new devices.
    run = {**SETTINGS, **managed, "TRAIN_STEPS": 100_000}
    client = runs.start("train", corpus, disturbed, **run)
    wait_for(lambda: newest_step(disturbed) > 0)
    disturb(client)
    moved_at = newest_step(disturbed)
    wait_for(lambda: newest_step(disturbed) > moved_at + 8)
    client.send_signal(signal.SIGTERM)
    _, error = client.communicate()
    assert client.returncode == 128 + signal.SIGTERM, error
    last = newest_step(disturbed)
    assert 4 <= resumed_step(error) < last
    assert not any(x.get("owners") for x in pods.list_all())
    train(corpus, undisturbed, PODS="in_process", TRAIN_STEPS=last)
  runs.assert_same_tensors(disturbed, undisturbed, last)
