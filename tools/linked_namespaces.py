# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces joined by a link of set bandwidth and delay.

10.77.0.1   tbf --->   link   <--- tbf   10.77.0.2

A delay is that of one direction: an answer takes it twice.
"""

# The kernel's token bucket (tbf) limits the bandwidth of each direction. The
# link is a veth pair if no delay is needed or if the kernel can delay packets
# (netem). Otherwise a process passes packets between two TUN devices, each
# packet after the delay.
#
# This file, run as a program, holds both namespaces open. The kernel removes
# the namespaces when that process ends, and ends the process with its parent.

import collections
import contextlib
import ctypes
import fcntl
import json
import math
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time

from palm_mtf.errors import UserError

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_DEVICE = "pods"
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_TUNSETIFF, _IFF_TUN_NO_PI = 0x400454CA, 0x1001
_MTU = 65000  # large, because packets may pass through Python
_QUEUE_BYTES = 16_000_000
# At once, two packets may leave, or the bytes that the link carries in a
# millisecond if these are more.
_LEAST_BURST_BYTES = 2 * _MTU
# Large buffers: bandwidth x round-trip time is in flight from the start.
_SYSCTLS = {
  "tcp_rmem": "4096 131072 67108864",
  "tcp_wmem": "4096 131072 67108864",
  "tcp_slow_start_after_idle": "0",
}


def end_with_parent() -> None:
  """Asks the kernel to end this process when its parent ends."""
  ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class LinkedNamespaces:
  """Two namespaces and their link, until the end of the `with` block."""

  def __init__(self, has_delay: bool):
    """Makes the namespaces and the link.

    Args:
      has_delay: whether `set_link` will be called with a delay.

    Raises:
      UserError: if a program or the rights of root are missing.
    """
    for program in ("ip", "tc", "nsenter"):
      if not shutil.which(program):
        raise UserError(
          f"there is no program {program} here; install iproute2 and "
          "util-linux."
        )
    self._is_tun = False
    self._hold()
    if has_delay and not self._has_netem():
      self._end()
      self._is_tun = True
      self._hold()
    if not self._is_tun:
      self._run(
        *[0, "ip", "link", "add", "name", _DEVICE, "type", "veth"],
        *["peer", "name", _DEVICE, "netns", self._paths[1]],
      )
    for side, address in enumerate(ADDRESSES):
      for line in (
        "link set lo up",
        f"address add {address}/24 dev {_DEVICE}",
        f"link set {_DEVICE} mtu {_MTU} up",
      ):
        self._run(side, "ip", *line.split())
      for name, value in _SYSCTLS.items():
        path = f"/proc/sys/net/ipv4/{name}"
        self._run(side, "sh", "-c", f"echo {value} > {path}")

  def __enter__(self) -> "LinkedNamespaces":
    return self

  def __exit__(self, *unused: object) -> None:
    self._end()

  @property
  def kind(self) -> str:
    """Kind of the link, for messages."""
    return "a relay between TUN devices" if self._is_tun else "a veth pair"

  def command(self, side: int, *command: str) -> list[str]:
    """Returns the command line that runs `command` in one namespace."""
    return ["nsenter", f"--net={self._paths[side]}", *command]

  def set_link(self, bits_per_sec: float, delay_secs: float) -> None:
    """Sets bandwidth and delay of each direction; infinity is no limit."""
    if self._is_tun:
      self._holder.stdin.write(f"{delay_secs}\n")
      self._holder.stdin.flush()
    for side, _ in enumerate(ADDRESSES):
      change = f"tc qdisc replace dev {_DEVICE}"
      parent = "root"
      if bits_per_sec == math.inf:
        self._run(side, *f"{change} root pfifo".split())
      else:
        burst = max(_LEAST_BURST_BYTES, int(bits_per_sec / 8 / 1000))
        limit = f"rate {bits_per_sec:.0f}bit burst {burst} limit {_QUEUE_BYTES}"
        self._run(side, *f"{change} root handle 1: tbf {limit}".split())
        parent = "parent 1:"
      if delay_secs and not self._is_tun:
        delay = f"netem delay {1000 * delay_secs}ms limit 100000"
        self._run(side, *f"{change} {parent} {delay}".split())

  def passed_bytes(self) -> int:
    """Returns the bytes of packets that the link has passed, in both ways."""
    # The counters of the first namespace's device, as the kernel keeps them.
    shown = subprocess.check_output(
      self.command(0, "cat", "/proc/net/dev"), text=True
    )
    (line,) = (x for x in shown.splitlines() if f"{_DEVICE}:" in x)
    fields = line.partition(":")[2].split()
    return int(fields[0]) + int(fields[8])  # received and sent

  def _hold(self) -> None:
    self._holder = subprocess.Popen(
      [sys.executable, __file__, *["tun"] * self._is_tun],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    if not (line := self._holder.stdout.readline()):
      _, error = self._holder.communicate()
      raise UserError(
        f"no network namespace can be made ({error.splitlines()[-1]}); it "
        "takes the rights of root (CAP_SYS_ADMIN and CAP_NET_ADMIN)."
      )
    self._paths = [
      f"/proc/{self._holder.pid}/fd/{number}" for number in json.loads(line)
    ]

  def _end(self) -> None:
    # Close the holder's stdin, so that the holder and the namespaces end.
    self._holder.communicate()

  def _has_netem(self) -> bool:
    command = "tc qdisc add dev lo root netem delay 1ms".split()
    done = subprocess.run(self.command(0, *command), capture_output=True)
    return done.returncode == 0

  def _run(self, side: int, *command: str) -> None:
    done = subprocess.run(
      self.command(side, *command), capture_output=True, text=True
    )
    if done.returncode:
      raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


class _Relay:
  """Passes packets from one device to another, each after `delay_secs`."""

  delay_secs = 0.0  # the same for all relays

  def __init__(self, source: int, sink: int):
    self._source, self._sink = source, sink
    threading.Thread(target=self._pass_packets, daemon=True).start()

  def _pass_packets(self) -> None:
    waiting: collections.deque[tuple[float, bytes]] = collections.deque()
    while True:
      secs = None
      if waiting:
        secs = max(0.0, waiting[0][0] - time.monotonic())
      ready, _, _ = select.select([self._source], [], [], secs)
      if ready:
        due = time.monotonic() + self.delay_secs
        waiting.append((due, os.read(self._source, 2 * _MTU)))
      while waiting and waiting[0][0] <= time.monotonic():
        with contextlib.suppress(OSError):  # the sink is not up yet
          os.write(self._sink, waiting.popleft()[1])


def _enter_new_namespace() -> int:
  """Enters a new network namespace; returns its file descriptor."""
  libc = ctypes.CDLL(None, use_errno=True)
  if libc.unshare(_CLONE_NEWNET):
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
  return os.open("/proc/self/ns/net", os.O_RDONLY)


def _make_tun() -> int:
  """Makes a TUN device in this namespace; returns its file descriptor."""
  tun = os.open("/dev/net/tun", os.O_RDWR)
  request = struct.pack("16sH22x", _DEVICE.encode(), _IFF_TUN_NO_PI)
  fcntl.ioctl(tun, _TUNSETIFF, request)
  return tun


def main() -> None:
  """Holds two namespaces, and with "tun" their link, until stdin ends."""
  end_with_parent()
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
  namespaces, tuns = [], []
  for _ in ADDRESSES:
    namespaces.append(_enter_new_namespace())
    if sys.argv[1:] == ["tun"]:
      tuns.append(_make_tun())
  if tuns:
    _Relay(*tuns)
    _Relay(*reversed(tuns))
  print(json.dumps(namespaces), flush=True)
  for line in sys.stdin:
    _Relay.delay_secs = float(line)


if __name__ == "__main__":
  main()
