# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Starts servers while an intruder sends them requests, for the tests.

intrusion.py COUNT [UID]: the intruder is user UID; without UID, it is another
host, in a new network namespace.
"""

import contextlib
import ctypes
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

NOBODY = 65534
# Of this host and of the intruder's.
HERE, NOT_HERE, THERE = "10.9.8.1", "10.9.8.3", "10.9.8.2"
_INTRUDER = Path(__file__).with_name("intruder.py")
_CLONE_NEWNET = 0x40000000


class Intruder:
  """A process of intruder.py; a context manager.

  Attributes:
    pid: process id.
    lines: lines printed so far; all lines once the context has ended.
  """

  def __init__(
    self, uid: int, *addresses: str, first: Callable[[], None] | None = None
  ):
    """Starts the process, which calls `first`; waits until it is ready."""
    self._process = subprocess.Popen(
      [sys.executable, "-I", _INTRUDER, str(uid), *addresses],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      preexec_fn=first,
    )
    self.pid = self._process.pid
    self.lines: list[str] = []
    self.wait_for("ready")

  def __enter__(self) -> "Intruder":
    return self

  def __exit__(self, *unused: object) -> None:
    rest, _ = self._process.communicate()
    self.lines += rest.splitlines()

  def wait_for(self, *lines: str) -> None:
    """Waits until the process has printed these lines."""
    while not set(lines) <= set(self.lines):
      line = self._process.stdout.readline()
      assert line, self.lines
      self.lines.append(line.rstrip())

  def answered(self) -> list[str]:
    """Returns the addresses that have answered."""
    return [x.split()[1] for x in self.lines if x.startswith("answered")]


def free_ports(count: int) -> list[int]:
  """Returns different ports that were free just now."""
  with contextlib.ExitStack() as stack:
    return [
      stack.enter_context(socket.create_server(("", 0))).getsockname()[1]
      for _ in range(count)
    ]


def start_servers_on_loopback(count: int, uid: int) -> list[str]:
  """Starts servers while a user sends requests; returns who answers."""
  from palm_mtf.runtime.server.start import start_server

  ports = free_ports(count)
  addresses = [f"{ip}:{port}" for ip in ("127.0.0.1", "::1") for port in ports]
  with Intruder(uid, *addresses) as intruder:
    for port in ports:
      start_server(1, 1, ("127.0.0.1", port))
    # The intruder has got the last connection to each server cut.
    intruder.wait_for(*(f"cut 127.0.0.1:{port}" for port in ports))
  return intruder.answered()


def start_servers_before_another_host(count: int) -> list[str]:
  """Starts servers while another host sends requests; returns who answers.

  Half of the servers listen on loopback and half at HERE, where the other host
  may reach them. It sends requests to all servers at NOT_HERE, and to the last
  server at HERE. Call this as the root of a network namespace.
  """
  from palm_mtf.runtime.server.start import start_server

  ports = free_ports(count)
  addresses = [f"{NOT_HERE}:{port}" for port in ports]
  last = f"{HERE}:{ports[-1]}"
  with Intruder(0, *addresses, last, first=leave_network) as intruder:
    there = f"nsenter --net=/proc/{intruder.pid}/ns/net "
    for line in (
      "ip link set lo up",
      f"ip link add near type veth peer name far netns {intruder.pid}",
      f"ip address add {HERE}/24 dev near",
      f"ip address add {NOT_HERE}/24 dev near",
      "ip link set near up",
      f"{there} ip address add {THERE}/24 dev far",
      f"{there} ip link set far up",
    ):
      subprocess.run(line.split(), check=True)
    for i, port in enumerate(ports):
      start_server(1, 1, (HERE if i % 2 else "127.0.0.1", port))
    intruder.wait_for(f"answered {last}")
  return intruder.answered()


def leave_network() -> None:
  """Puts this process into a new network namespace."""
  if ctypes.CDLL(None).unshare(_CLONE_NEWNET):
    raise OSError("no network namespace")


if __name__ == "__main__":
  if uid := sys.argv[2:]:
    print(*start_servers_on_loopback(int(sys.argv[1]), int(uid[0])))
  else:
    print(*start_servers_before_another_host(int(sys.argv[1])))
