# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A run gets its servers from a manager, and others when it loses some."""

import dataclasses
import signal
import time

import numpy as np
import pytest

from palm_mtf import runtime
from palm_mtf.commands.pods_serve import join_manager
from palm_mtf.config import MeshLayout, PodsConfig
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.errors import UserError
from palm_mtf.runtime.client.local_servers import PodServers
from palm_mtf.runtime.client.managed_places import check_slices
from palm_mtf.runtime.manager.service import serve
from palm_mtf.runtime.server.start import start_server
from tests import runs
from tests.commands.pods_manage_test import Processes
from tests.mtf_testing import SINGLE
from tests.runtime.client.recovery_test import resumed_step, train
from tests.runtime.manager.service_test import (
  connect,
  register,
  tensorflow_address,
)

TWO = MeshLayout(mesh_shape="data:2", layout="batch:data")


@pytest.fixture
def pods(tmp_path):
  """Settings of a pod, and a manager of one server with two devices."""
  with serve("127.0.0.1", 0, str(tmp_path / "state"), "") as port:
    yield PodsConfig(
      pods="cluster", islands="auto", manager=f"127.0.0.1:{port}"
    )


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


def test_traced_programs_run_on_devices_that_the_manager_gives(pods):
  with join(pods) as client:
    with runtime.connect(manager=pods.manager, devices=2, share=2.0) as traced:
      (slice_,) = traced.slices("2")
      total = runtime.function(lambda x: runtime.all_sum(x)).on(slice_)
      found = total(np.arange(4.0)).fetch()
      np.testing.assert_array_equal(found, [2, 4, 2, 4])
      assert len(client.call("list_all")[0]["owners"]) == 1
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
      "ISLANDS = 'atuo' (did you mean \"auto\"?): choose one of 'auto'.",
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
  with pytest.raises(UserError) as error:
    PodsConfig(**settings)
  assert str(error.value) == message


@pytest.mark.slow
def test_a_run_that_loses_a_server_continues_on_another_with_the_same_bits(
  corpus, tmp_path
):
  lost, undisturbed = tmp_path / "lost", tmp_path / "undisturbed"
  with Processes(tmp_path) as pods:
    servers = dict(pods.serve()[::-1] for _ in range(3))
    managed = {
      "PODS": "cluster",
      "ISLANDS": "auto",
      "MANAGER": pods.address,
      "ON_POD_FAILURE": "wait",
    }

    def kill_one(unused_client):
      used = [x["address"] for x in pods.list_all() if x.get("owners")]
      assert len(used) == 2
      servers.pop(used[0]).send_signal(signal.SIGKILL)

    error = train(corpus, lost, kill_one, **managed)
    assert 4 <= resumed_step(error) < 60
    assert [x["owners"] for x in pods.list_all() if "owners" in x] == 3 * [[]]
    train(corpus, undisturbed, **managed)
  runs.assert_same_tensors(lost, undisturbed, 60)


@pytest.mark.slow
def test_a_run_outlives_its_manager_and_leaves_a_drained_server(
  corpus, tmp_path
):
  disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
  with Processes(tmp_path) as pods:
    servers = dict(pods.serve()[::-1] for _ in range(4))
    managed = {
      "PODS": "cluster",
      "ISLANDS": "auto",
      "MANAGER": pods.address,
      "ON_POD_FAILURE": "wait",
    }

    def disturb(unused_client):
      pods.manager.kill()
      pods.manager.wait()
      pods.manager = pods.manage()
      pods.wait_for(dict.fromkeys(servers, "serving"))
      first, second = (x["address"] for x in pods.list_all() if x.get("owners"))
      with connect(pods.address.partition(":")[2]) as client:
        client.call("drain", address=first, is_drained=True)
      servers[second].send_signal(signal.SIGKILL)
      used = set()
      while len(used - {second}) < 2 or first in used:
        used = {x["address"] for x in pods.list_all() if x.get("owners")}
        time.sleep(0.1)

    error = train(corpus, disturbed, disturb, **managed)
    assert 4 <= resumed_step(error) < 60
    train(corpus, undisturbed, PODS="in_process")
  runs.assert_same_tensors(disturbed, undisturbed, 60)
