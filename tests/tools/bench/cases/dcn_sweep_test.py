# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The sweep limits real links and cleans up, or says why it cannot."""

import contextlib
import ctypes
import json
import pathlib
import shutil
import subprocess
import sys

import pytest

from palm_mtf.errors import UserError
from tests import processes
from tools.linked_namespaces import ADDRESSES, LinkedNamespaces

SEND = f"""
import socket
with socket.create_server(("{ADDRESSES[1]}", 5000)) as server:
  print("ready", flush=True)
  connection, _ = server.accept()
  with connection, connection.makefile("rb") as file:
    file.read(NUM_BYTES)
    connection.sendall(b"!")
"""
RECEIVE = f"""
import socket, time
with socket.create_connection(("{ADDRESSES[1]}", 5000)) as connection:
  start = time.monotonic()
  connection.sendall(bytes(NUM_BYTES))
  connection.recv(1)
  print(time.monotonic() - start)
"""


def secs_to_send(namespaces, num_bytes):
  """Sends bytes to the second namespace, and waits for one byte back."""
  server, client = (
    namespaces.command(
      side, sys.executable, "-c", f"NUM_BYTES={num_bytes}{code}"
    )
    for side, code in ((1, SEND), (0, RECEIVE))
  )
  with subprocess.Popen(server, stdout=subprocess.PIPE) as process:
    process.stdout.readline()
    return float(subprocess.check_output(client, timeout=60))


@contextlib.contextmanager
def linked(has_delay):
  """Yields namespaces; skips the test without the rights to make them."""
  try:
    with LinkedNamespaces(has_delay) as namespaces:
      yield namespaces
  except UserError as error:
    pytest.skip(str(error))


@pytest.mark.parametrize("has_delay", [False, True])
def test_a_link_has_its_bandwidth_and_delay_and_is_gone_at_the_end(has_delay):
  """2 MB take 0.16 s at 100 Mb/s; the first bytes may leave immediately.

  A byte and its answer take the delay twice.
  """
  with linked(has_delay) as namespaces:
    namespaces.set_link(100e6, 0.0)
    assert 0.13 < secs_to_send(namespaces, 2_000_000) < 0.3
    namespaces.set_link(float("inf"), 0.0)
    assert secs_to_send(namespaces, 2_000_000) < 0.1
    if has_delay:
      namespaces.set_link(1e9, 0.1)
      assert 0.2 <= secs_to_send(namespaces, 1) < 0.3
    holder = namespaces._holder.pid
  assert not pathlib.Path(f"/proc/{holder}").exists()


def give_up_rights():
  """Takes CAP_SYS_ADMIN from the program that runs next, also from root."""
  pr_capbset_drop, cap_sys_admin = 24, 21
  ctypes.CDLL(None).prctl(pr_capbset_drop, cap_sys_admin)


def test_without_the_rights_it_says_so_and_stops():
  has_programs = all(map(shutil.which, ("ip", "tc", "nsenter")))
  message = "takes the rights of root" if has_programs else "install iproute2"
  command = [processes.ROOT / "tools" / "bench", "dcn_sweep"]
  done = processes.python(*command, preexec_fn=give_up_rights)
  assert done.returncode == 2
  (line,) = done.stderr.splitlines()
  assert line.startswith("bench dcn_sweep: ") and message in line


@pytest.mark.slow
def test_a_slow_link_takes_the_time_of_its_bytes():
  """5.9 MB each way at 100 Mb/s take 0.47 s; a step hides a part of it."""
  done = processes.python(
    *[processes.ROOT / "tools" / "bench", "dcn_sweep"],
    *["--mbits=100", "--delays_ms=0", "--dtypes=float32", "--steps=2"],
    "--json",
  )
  if done.returncode == 2:
    pytest.skip(done.stderr)
  assert done.returncode == 0, done.stderr
  unlimited, slow = map(json.loads, done.stdout.splitlines())
  # README's 1,474,560 parameters, and 5 norms of 128 numbers.
  assert unlimited["dcn_bytes"] == 2 * (4 * (1_474_560 + 5 * 128) + 12)
  assert unlimited["ratio"] == 1
  assert slow["step_secs"] > 8 * slow["dcn_bytes"] / 2 / 100e6 * 0.95
  assert 0.6 < slow["ratio"] < 1.6
