# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Nobody but the user of a server on loopback is heard by it."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys

import pytest

from palm_mtf.cluster.client.local_servers import PodServers
from palm_mtf.cluster.server.admission import (
  admit_own_user,
  restrict_to_admitted,
)
from palm_mtf.config import PodsConfig
from tests import processes
from tests.mtf_testing import SINGLE

NOBODY = 65534

as_root = pytest.mark.skipif(
  os.geteuid() != 0, reason="only root can become another user"
)

# Each user in a process of its own, forked before TensorFlow's first call.
ASK = """
import os, sys
from palm_mtf.cluster.server_info import NoAnswerError, read_info
*addresses, users = sys.argv[1:]
asked = [(x, int(uid)) for x in addresses for uid in users.split()]
for address, uid in asked:
  pid = os.fork()
  if not pid:
    os.setuid(uid)
    try:
      print(uid, read_info(address, 5.0).num_devices, flush=True)
    except NoAnswerError:
      print(uid, "no answer", flush=True)
    os._exit(0)
  os.waitpid(pid, 0)
"""


def speak(port, uid=None, ip="127.0.0.1"):
  """Connects and says "hello" as a user; returns the process that waits."""
  pid = os.fork()
  if pid:
    return pid
  code = 1
  try:
    if uid is not None:
      os.setuid(uid)
    with socket.create_connection((ip, port), timeout=10) as connection:
      connection.sendall(b"hello")
      code = 0 if connection.recv(1) == b"!" else 1
  finally:
    os._exit(code)


def heard(listener):
  """Accepts a connection; returns what arrives by it, and answers."""
  connection, _ = listener.accept()
  with connection, contextlib.suppress(ConnectionResetError):
    connection.settimeout(10)
    data = connection.recv(5)
    if data:
      connection.sendall(b"!")
    return data
  return b""


def exit_code(pid):
  return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["ipv4", "ipv6"])
def listener(request):
  """Listens as TensorFlow does in the second case: on both at once."""
  dual = request.param == socket.AF_INET6
  if dual and not socket.has_dualstack_ipv6():
    pytest.skip("no IPv6 here")
  with socket.create_server(
    ("", 0), family=request.param, dualstack_ipv6=dual
  ) as server:
    server.settimeout(10)
    yield server


def test_the_own_user_is_heard(listener):
  port = listener.getsockname()[1]
  restrict_to_admitted(listener)
  admit_own_user(port)
  ips = ["127.0.0.1", "127.0.0.2"]
  if listener.family == socket.AF_INET6:
    ips.append("::1")
  for ip in ips:
    pid = speak(port, ip=ip)
    assert heard(listener) == b"hello"
    assert exit_code(pid) == 0


@as_root
def test_another_user_is_cut_off_unheard(listener):
  port = listener.getsockname()[1]
  restrict_to_admitted(listener)
  admit_own_user(port)
  pid = speak(port, NOBODY)
  assert heard(listener) == b""
  assert exit_code(pid) == 1


def test_a_uid_that_stands_for_other_users_too_admits_nobody():
  """As in a container of a user who has no uid there."""
  unshare = ["unshare", "--user"]
  if not shutil.which("unshare") or subprocess.call([*unshare, "true"]):
    pytest.skip("no user namespaces here")
  program = (
    "from palm_mtf.cluster.server.admission import *; admit_own_user(2222)"
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


@as_root
def test_the_servers_of_a_run_answer_its_user_and_no_other():
  """Reads files is what another user could else do, by any of the servers."""
  pods = PodsConfig(num_pods=2, pods="local_servers")
  with PodServers(pods, SINGLE) as servers:
    addresses = [address for ((address, _),) in servers.places()]
    done = processes.python("-c", ASK, *addresses, f"0 {NOBODY} 0")
  answers = ["0 1", f"{NOBODY} no answer", "0 1"]
  assert done.stdout.splitlines() == 2 * answers, done.stderr
