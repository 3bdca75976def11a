# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""ISLANDS gives each pod its devices, or is refused with its text."""

import pytest

from palm_mtf.config import MeshLayout, PodsConfig
from palm_mtf.errors import UserError
from palm_mtf.runtime.client.places import Place, places_of_pods, resolve_places

MESH = MeshLayout(mesh_shape="data:2,model:2", layout="batch:data,d_ff:model")


def places(*islands, num_pods=None):
  pods = PodsConfig(
    num_pods=num_pods or len(islands), pods="cluster", islands=islands
  )
  return places_of_pods(pods, MESH)


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
      for entry in ("b", "b:70000")
    ],
  ],
)
def test_an_impossible_table_is_refused_with_the_arithmetic(islands, message):
  with pytest.raises(UserError) as error:
    places(*islands)
  assert str(error.value) == message


def test_a_table_of_other_pods_than_there_are_is_refused():
  with pytest.raises(UserError, match="ISLANDS has 1 pods and NUM_PODS = 2"):
    places(["a:1"], num_pods=2)


def message_of(function, *arguments):
  with pytest.raises(UserError) as error:
    function(*arguments)
  return str(error.value)


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

  def places(*islands):
    pods = PodsConfig(num_pods=len(islands), pods="cluster", islands=islands)
    return places_of_pods(pods, mesh)

  assert places(["a:1", "b:2"], ["c:3/4-7"]) == [
    [Place("a:1", 0), Place("a:1", 1), Place("b:2", 0), Place("b:2", 1)],
    [Place("c:3", 4), Place("c:3", 5), Place("c:3", 6), Place("c:3", 7)],
  ]
  assert message_of(places, ["a:1/0", "b:2/0"]) == (
    "ISLANDS: pod 0 has 1 + 1 = 2 devices and needs 2 x 2 = 4 (MESH_SHAPE = "
    '"data:2", STAGES = 2); give as many as the pod needs.'
  )
