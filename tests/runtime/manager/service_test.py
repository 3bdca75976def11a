# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The manager's server answers its own user, or holders of its key."""

import dataclasses
import functools
import os
import subprocess

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from palm_mtf.runtime.manager import client as client_module
from palm_mtf.runtime.manager.client import ManagerClient
from palm_mtf.runtime.manager.service import serve
from palm_mtf.runtime.manager.slices import Server
from palm_mtf.runtime.server.start import start_server
from tests.refusals import message_of
from tests.runtime.intrusion import NOBODY, Intruder, free_ports


@functools.cache
def tensorflow_address():
  """Address of a TensorFlow server of this process, with two devices."""
  return start_server(2, 1).target.removeprefix("grpc://")


@pytest.fixture
def port(tmp_path):
  with serve("127.0.0.1", 0, str(tmp_path / "state"), "") as port:
    yield port


def connect(port, tls=""):
  return ManagerClient("MANAGER", f"127.0.0.1:{port}", tls)


def register(client, address, devices):
  sizes = {"num_devices": devices, "device_bytes": 10**9}
  kind = {"palm_mtf": "1"}
  server = Server(address=address, island="main", kind=kind, **sizes)
  client.call("register", server=dataclasses.asdict(server))


def test_a_server_that_lies_about_its_devices_is_refused(port):
  address = tensorflow_address()
  with connect(port) as client:
    assert message_of(register, client, address, 3) == (
      f"the server {address} registers 3 devices, and TensorFlow has 2 there; "
      "start it with --devices 2."
    )
    assert client.call("list_all") == []
    register(client, address, 2)
    assert [x["num_devices"] for x in client.call("list_all")] == [2]


def test_a_server_that_the_manager_does_not_reach_is_refused(port):
  (free,) = free_ports(1)
  with connect(port) as client:
    for address in (f"127.0.0.1:{free}", f"127.0.0.1:{port}"):
      assert message_of(register, client, address, 1) == (
        f"no TensorFlow server answers the manager at {address}; start the "
        "server at an address that the manager reaches (--listen)."
      )


def test_another_version_of_requests_is_refused_by_both_versions(
  port, monkeypatch
):
  monkeypatch.setattr(client_module, "PROTOCOL", 99)
  monkeypatch.setattr(client_module, "__version__", "9.9")
  with connect(port) as client:
    message = message_of(client.call, "list_all")
  beginning = f'MANAGER = "127.0.0.1:{port}": the manager is of palm_mtf '
  assert message.startswith(beginning)
  assert message.endswith(
    " and you have palm_mtf 9.9, whose requests differ; use one version."
  )


@pytest.mark.parametrize("request_", [b"", b"[]", b"\xff", b'{"nome": "a"}'])
def test_what_is_no_request_is_refused_and_the_manager_goes_on_answering(
  request_, port
):
  with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    with pytest.raises(grpc.RpcError) as error:
      channel.unary_unary("/palm_mtf.Manager/beat")(
        request_, 10, [("protocol", str(client_module.PROTOCOL))]
      )
  assert error.value.code() == grpc.StatusCode.INTERNAL
  assert error.value.details() == "no request of palm_mtf"
  with connect(port) as client:
    assert client.call("list_all") == []


def test_health_checkers_get_an_answer(port):
  with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    for name in ("", "palm_mtf.Manager"):
      asked = health_pb2.HealthCheckRequest(service=name)
      reply = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=10)
      assert reply.status == health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
  """Prefixes of two keys with their certificates, as docs/pods.md makes."""
  prefixes = [str(tmp_path_factory.mktemp("keys") / x) for x in ("our", "of")]
  for prefix in prefixes:
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=pods"
    files = ["-keyout", f"{prefix}.key", "-out", f"{prefix}.pem"]
    command = [*command.split(), *files]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
  return prefixes


def test_only_holders_of_the_key_get_an_answer(keys, tmp_path):
  ours, others = keys
  with serve("127.0.0.1", 0, str(tmp_path / "state"), ours) as port:
    with connect(port, ours) as client:
      assert client.call("list_all") == []
    for tls in ("", others):
      with connect(port, tls) as client:
        assert message_of(client.call, "list_all") == (
          f'MANAGER = "127.0.0.1:{port}": no manager answers there; start '
          "`palm_mtf pods manage`, or give the address that it prints, and its "
          "key if it has one."
        )


def test_what_is_no_key_is_one_line(keys, tmp_path):
  ours, others = keys
  mixed = tmp_path / "mixed"
  os.symlink(f"{ours}.key", f"{mixed}.key")
  os.symlink(f"{others}.pem", f"{mixed}.pem")
  for prefix in (str(mixed), str(tmp_path / "missing")):
    message = message_of(connect, 1, prefix)
    assert message.startswith(
      f"{prefix}.key and {prefix}.pem are no key with its certificate ("
    )
    assert message.endswith("); docs/pods.md shows how to make them.")


@pytest.mark.skipif(
  os.geteuid() != 0, reason="only root can become another user"
)
def test_another_user_gets_no_answer_from_a_manager_that_starts(tmp_path):
  (port,) = free_ports(1)
  address = f"127.0.0.1:{port}"
  with Intruder(NOBODY, address, f"::1:{port}") as intruder:
    with serve("127.0.0.1", port, str(tmp_path / "state"), ""):
      intruder.wait_for(f"cut {address}")
      with connect(port) as client:
        assert client.call("list_all") == []
  assert intruder.answered() == []
  with Intruder(os.geteuid(), address) as intruder:
    with serve("127.0.0.1", port, str(tmp_path / "state"), ""):
      intruder.wait_for(f"answered {address}")  # else silence proves nothing
