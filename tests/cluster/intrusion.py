# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Starts servers while an intruder asks them, for the tests.

intrusion.py COUNT [UID]: while a user asks them; without UID, while another
host does, in a new network namespace.
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
    pid: its number.
    lines: what it has said so far; all once the context has ended.
  """

  def __init__(
    self, uid: int, *addresses: str, first: Callable[[], None] | None = None
  ):
    """Starts it, and waits until it is ready; its process calls `first`."""
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
    """Waits until it has said lines."""
    while not set(lines) <= set(self.lines):
      line = self._process.stdout.readline()
      assert line, self.lines
      self.lines.append(line.rstrip())

  def answered(self) -> list[str]:
    """Returns the addresses that have answered it."""
    return [x.split()[1] for x in self.lines if x.startswith("answered")]


def free_ports(count: int) -> list[int]:
  """Returns different ports that were free just now."""
  with contextlib.ExitStack() as stack:
    return [
      stack.enter_context(socket.create_server(("", 0))).getsockname()[1]
      for _ in range(count)
    ]


def start_servers_on_loopback(count: int, uid: int) -> list[str]:
  """Starts servers, asked by a user all the time; returns who answers it."""
  from palm_mtf.cluster.server.start import start_server

  ports = free_ports(count)
  addresses = [f"{ip}:{port}" for ip in ("127.0.0.1", "::1") for port in ports]
  with Intruder(uid, *addresses) as intruder:
    for port in ports:
      start_server(1, 1, ("127.0.0.1", port))
    # It has asked each server to the end: none is left to be judged.
    intruder.wait_for(*(f"cut 127.0.0.1:{port}" for port in ports))
  return intruder.answered()


def start_servers_before_another_host(count: int) -> list[str]:
  """Starts servers, asked by another host; returns who answers it.

  Half of them listen on loopback and half at HERE, which the other host may
  ask. It asks them all at NOT_HERE, and the last one at HERE. To be called as
  the root of a network namespace.
  """
  from palm_mtf.cluster.server.start import start_server

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
