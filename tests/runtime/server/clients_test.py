# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A server frees what gone clients held, and reports silent links."""

import contextlib
import dataclasses
import json
import threading
import time

import pytest

from palm_mtf._tf import tf
from palm_mtf.config import MeshLayout, PodsConfig
from palm_mtf.executors.host.starter import HostStarter
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.client.connect import Membership, connect
from palm_mtf.runtime.client.places import Place
from palm_mtf.runtime.program import Program
from palm_mtf.runtime.server import clients
from palm_mtf.runtime.server.clients import find_silent_peers
from palm_mtf.runtime.server.start import start_server
from palm_mtf.runtime.server_info import call_function, read_info
from tests.processes import wait_for
from tests.relay import Relay
from tests.runtime.served import Served

SECS = 6.0


@pytest.fixture(scope="module")
def address():
  return start_server(1, 1).target.removeprefix("grpc://")


def cluster_of(address):
  """Returns a cluster of one server, whose client has its own name."""
  pods = PodsConfig(pods="cluster", islands=[[address]], pod_timeout_secs=SECS)
  infos = {address: read_info(address, SECS)}
  mesh = MeshLayout(mesh_shape="", layout="")
  return connect(HostStarter(), pods, mesh, [[Place(address, 0)]], infos)


def with_registration(cluster, **fields):
  """Returns a cluster whose client tells other fields to its servers."""
  client = dataclasses.replace(cluster.membership.client, **fields)
  membership = dataclasses.replace(cluster.membership, client=client)
  return dataclasses.replace(cluster, membership=membership)


def start_thread(function, *arguments):
  thread = threading.Thread(target=function, args=arguments, daemon=True)
  thread.start()
  return thread


class Holder:
  """A client that holds a variable, which has one name in all clients."""

  def __init__(self, client: Client, device: str, value: float):
    with client.graph.as_default(), tf.device(device):
      variable = tf.Variable(value, name="held", use_resource=True)
      self._read = Program(outputs=variable.value())
    self._client = client
    client.call(Program(operations=[variable.initializer]))

  def read(self) -> float:
    return self._client.call(self._read)


def hold(stack, cluster, value):
  client = stack.enter_context(cluster.client())
  return Holder(client, cluster.devices.pods[0][0], value)


def wait_until_forgotten(name):
  wait_for(lambda: name not in clients._clients, SECS)


def test_clients_join_and_leave_in_any_order(address):
  with contextlib.ExitStack() as last:
    with contextlib.ExitStack() as first:
      a = hold(first, cluster_of(address), 1.0)
      b = hold(last, cluster_of(address), 2.0)
      assert (a.read(), b.read()) == (1.0, 2.0)
      assert len(clients._clients) == 2
    assert len(clients._clients) == 1
    c = hold(last, cluster_of(address), 3.0)
    assert (b.read(), c.read()) == (2.0, 3.0)
  assert not clients._clients


@pytest.mark.parametrize("how", ["restarted", "ended", "succeeded"])
def test_only_the_sessions_of_a_client_that_is_gone_are_deleted(address, how):
  """The server finds another process where the client was, or none.

  Or the next client of the process says that this client has ended.
  """
  gone = cluster_of(address)
  name = gone.membership.client.name
  with contextlib.ExitStack() as stack:
    other = hold(stack, cluster_of(address), 2.0)
    lost = hold(stack, gone, 1.0)
    probe = clients._clients[name]
    if how == "restarted":
      probe._client = dataclasses.replace(probe._client, incarnation=1)
    elif how == "ended":
      probe._address = "127.0.0.1:9"
    else:
      Membership._ended[address].add(name)
    third = hold(stack, cluster_of(address), 3.0)
    wait_until_forgotten(name)
    assert (other.read(), third.read()) == (2.0, 3.0)
    with pytest.raises(tf.errors.AbortedError):
      lost.read()


@pytest.mark.slow
def test_a_client_waits_for_a_server_that_computes_for_others(address):
  """All threads of the server wait for this test."""
  begun, free = threading.Event(), threading.Event()

  def wait():
    begun.set()
    free.wait(60)
    return 0.0

  cluster = with_registration(cluster_of(address), secs=3.0)
  with (
    tf.Graph().as_default(),
    tf.Session(f"grpc://{address}") as session,
    contextlib.ExitStack() as stack,
  ):
    waits = [tf.numpy_function(wait, [], tf.float64) for _ in range(100)]
    stack.callback(start_thread(session.run, waits).join)
    stack.callback(free.set)
    assert begun.wait(60)
    time.sleep(0.2)  # until all threads have begun
    joining = start_thread(cluster.membership.join)
    joining.join(4.0)
    assert joining.is_alive()
    free.set()
    joining.join(60)
    assert cluster.membership.client.name in clients._clients
    cluster.membership.leave(10.0)
  assert not clients._clients


def ask_silent(address, peer):
  asked = json.dumps({"peers": [peer], "secs": SECS})
  info = read_info(address, SECS)
  given = address, info, find_silent_peers, asked, SECS
  return json.loads(call_function(*given))


def wait_for_silent(address, peer, expected, secs):
  """Waits until a server reports `expected`."""
  wait_for(lambda: ask_silent(address, peer) == expected, secs)


@pytest.mark.slow  # waits for its timeouts
def test_a_silent_link_is_reported_in_time_and_while_it_lasts():
  """A relay to the second server drops the first server's packets."""
  with (
    Served(2) as servers,
    contextlib.closing(Relay(servers.addresses[1])) as relay,
  ):
    first, second = servers.addresses[0], relay.address
    start = time.monotonic()
    while time.monotonic() - start < SECS:
      assert ask_silent(first, second) == ask_silent(second, first) == []
    relay.silence(servers.processes[0].pid)
    # The client's heartbeat has the rest of the time.
    wait_for_silent(first, second, [second], 0.85 * SECS)
    # Through the same relay the client still reaches the second server.
    assert ask_silent(second, first) == []
    relay.silence(None)
    wait_for_silent(first, second, [], 2 * SECS)
