# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Only its user reaches a server on loopback, and no other host does."""

import contextlib
import errno
import os
import shutil
import socket
import subprocess
import sys

import pytest

from palm_mtf.runtime.addresses import socket_numbers
from palm_mtf.runtime.server import restricted_port as module
from palm_mtf.runtime.server import start
from palm_mtf.runtime.server.restricted_port import _admit_new, restricted_port
from tests import processes, runs
from tests.refusals import message_of
from tests.runtime.intrusion import (
  HERE,
  NOBODY,
  Intruder,
  leave_network,
  start_servers_on_loopback,
)

as_root = pytest.mark.skipif(
  os.geteuid() != 0, reason="only root can become another user"
)
LOOPBACK = ["127.0.0.1", "127.0.0.2", "::1"]


def assert_silent(port):
  """Asserts that no address of loopback answers the first packet to a port."""
  for ip in LOOPBACK:
    # Without IPv6 the connection is refused.
    with pytest.raises((TimeoutError, OSError)):
      socket.create_connection((ip, port), timeout=0.1)


@contextlib.contextmanager
def listening(port, family):
  """Listens as gRPC does."""
  with socket.socket(family) as listener:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if family == socket.AF_INET6:
      listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.bind(("", port))
    listener.listen()
    listener.settimeout(10)
    yield listener


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_connections_begun_during_a_start_reach_no_listener(family):
  """The listener never gets the connections, however it is restricted."""
  if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
    pytest.skip("no IPv6 here")
  with contextlib.ExitStack() as stack:
    with restricted_port("127.0.0.1", 0) as port:
      listener = stack.enter_context(listening(port, family))
      assert_silent(port)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as own:
      own.sendall(b"hello")
      connection, peer = listener.accept()
      with connection:
        assert peer[1] == own.getsockname()[1]
        connection.settimeout(10)
        assert connection.recv(5) == b"hello"
    listener.settimeout(0)
    with pytest.raises(BlockingIOError):
      listener.accept()


def test_two_servers_never_share_a_port():
  with contextlib.ExitStack() as stack:
    with restricted_port("127.0.0.1", 0) as port:
      with pytest.raises(OSError) as early, restricted_port("127.0.0.1", port):
        pass
      stack.enter_context(listening(port, socket.AF_INET))
    with pytest.raises(OSError) as late, restricted_port("127.0.0.1", port):
      pass
  assert early.value.errno == late.value.errno == errno.EADDRINUSE


def test_the_environment_is_left_as_it_was(monkeypatch):
  """Other servers of TensorFlow in this process do not share their ports."""
  name = "TF_GRPC_REUSE_PORT"
  for before in (None, "0"):
    if before:
      monkeypatch.setenv(name, before)
    with restricted_port("127.0.0.1", 0):
      assert os.environ[name] == "1"
    assert os.environ.get(name) == before


def test_a_server_of_tensorflow_is_silent_until_it_is_restricted(monkeypatch):
  @contextlib.contextmanager
  def tried(ip, port):
    with restricted_port(ip, port) as port:
      yield port
      assert_silent(port)
      tried.is_done = True

  monkeypatch.setattr(start, "restricted_port", tried)
  start.start_server(1, 1)
  assert tried.is_done


def test_a_port_that_another_process_took_is_one_line():
  """This happens if two `pods serve` start at the same time."""
  with socket.create_server(("127.0.0.1", 0)) as other:
    port = other.getsockname()[1]
    assert message_of(start.start_server, 1, 1, ("127.0.0.1", port)) == (
      f"127.0.0.1:{port}: another process has just begun to listen there; give "
      "another port, or 0 for any."
    )


def test_a_system_that_cannot_restrict_a_server_gets_none(monkeypatch):
  def refuse(listener):
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

  monkeypatch.setattr(module, "restrict_to_loopback", refuse)
  message = message_of(start.start_server, 1, 1)
  assert "(Operation not permitted)" in message


@as_root
def test_another_user_gets_no_answer_from_servers_that_start():
  assert start_servers_on_loopback(2, NOBODY) == []


def test_the_own_user_gets_an_answer_to_the_intruders_request():
  """Otherwise silence towards other users would prove nothing."""
  server = start.start_server(1, 1)
  address = server.target.removeprefix("grpc://")
  with Intruder(os.geteuid(), address) as intruder:
    intruder.wait_for(f"answered {address}")


def apart(*command, as_user=("--user", "--map-root-user")):
  """Returns a command in a new network namespace; may skip the test."""
  unshare = ["unshare", *as_user, "--net"]
  if not shutil.which("unshare") or subprocess.call(
    [*unshare, "ip", "link"], stdout=subprocess.DEVNULL
  ):
    pytest.skip("no namespaces, or no iproute2, here")
  return [*unshare, *command]


@pytest.mark.slow
def test_another_host_gets_no_answer_from_a_hundred_servers_that_start():
  """Only a server that listens at an address of this host answers there."""
  command = apart(sys.executable, "-m", "tests.runtime.intrusion", "10")
  for _ in range(10):
    done = subprocess.run(
      command, stdout=subprocess.PIPE, text=True, env=processes.environment()
    )
    assert done.returncode == 0
    (answered,) = done.stdout.split()
    assert answered.startswith(f"{HERE}:")


@pytest.mark.slow
@as_root
def test_another_user_gets_no_answer_from_a_hundred_servers_that_start():
  for _ in range(10):
    done = processes.python("-m", "tests.runtime.intrusion", 10, NOBODY)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


@pytest.mark.slow
@as_root
def test_another_user_gets_no_answer_from_any_server_of_a_run(corpus, tmp_path):
  """The client's and the pods', at random ports that the kernel lists."""
  apart("true")
  with Intruder(NOBODY, first=leave_network) as intruder:
    within = ["nsenter", f"--net=/proc/{intruder.pid}/ns/net"]
    subprocess.run([*within, *"ip link set lo up".split()], check=True)
    settings = {"PODS": "local_servers", "NUM_PODS": 2, "TRAIN_STEPS": 12}
    flags = runs.arguments("train", corpus, tmp_path / "run", **settings)
    command = [*within, sys.executable, "-m", "palm_mtf", *flags]
    subprocess.run(command, check=True, env=processes.environment())
  assert intruder.answered() == []
  assert len({x for x in intruder.lines if x.startswith("cut")}) == 3


def test_a_connection_is_checked_only_once():
  """A server with many connections is not busy with checks all the time."""
  with socket.create_server(("", 0)) as listener:
    before, known = {*socket_numbers()}, set()
    _admit_new(socket_numbers(), {listener.getsockname()[1]: known})
    # Servers that earlier tests started in this process may open and close
    # connections at the same time; all other sockets are known from now on.
    lasting = before & {*socket_numbers()}
    assert f"socket:[{os.fstat(listener.fileno()).st_ino}]" in lasting
  assert lasting <= known


def test_a_uid_that_stands_for_other_users_too_admits_nobody():
  """This happens in a container for a user who has no uid there."""
  unshare = ["unshare", "--user"]
  if not shutil.which("unshare") or subprocess.call([*unshare, "true"]):
    pytest.skip("no user namespaces here")
  program = (
    "from palm_mtf.runtime.server.restricted_port import admit_own_user as f; "
    "f(2222)"
  )
  done = subprocess.run(
    [*unshare, sys.executable, "-c", program],
    stderr=subprocess.PIPE,
    text=True,
    env=processes.environment(),
  )
  with open("/proc/sys/kernel/overflowuid") as file:
    uid = file.read().strip()
  assert done.stderr.splitlines()[-1] == (
    f"PermissionError: [Errno 1] user {uid} stands for all users that this "
    "user namespace does not map"
  )


def test_only_sockets_that_may_listen_later_are_checked_again():
  with (
    socket.create_server(("127.0.0.1", 0)) as listener,
    socket.create_connection(listener.getsockname()) as client,
    socket.socket() as idle,
    socket.socket(socket.AF_UNIX) as other,
  ):
    names = {
      f"socket:[{os.fstat(x.fileno()).st_ino}]": x.fileno()
      for x in (listener, client, idle, other)
    }
    seen: set[str] = set()
    module._restrict_new(names, seen)
    module._known.pop(listener.getsockname()[1])
    assert [names[x] for x in names.keys() - seen] == [idle.fileno()]


LATER = """
from palm_mtf.runtime.server import restricted_port as module
module.restrict_later_listeners()
with module.restricted_port("127.0.0.1", 0):
  print("listens")
"""


def test_no_guard_listens_where_later_listeners_are_restricted():
  """The restriction would replace the guard's filter, which drops all."""
  done = subprocess.run(
    [sys.executable, "-c", LATER], capture_output=True, text=True, check=False
  )
  assert (done.returncode, done.stdout) == (1, "")
  assert "AssertionError: its thread would let guards accept" in done.stderr
