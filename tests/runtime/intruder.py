# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A program that sends requests to servers endlessly, before they listen too.

intruder.py UID [ADDRESS...]

As user UID, asks the TensorFlow server at each ADDRESS, "ip:port", for the
state of its devices, by one new connection after another. Without an ADDRESS,
asks at each loopback port where something begins to listen. Prints "connected
ADDRESS", "cut ADDRESS" and "answered ADDRESS" when each happens for the first
time. Ends with stdin.
"""

import collections
import contextlib
import functools
import os
import select
import socket
import sys
import time

# Connections to an address at a time, and each connection's seconds to wait.
_MOST, _SECS = 8, 1.5


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
  """Returns a frame of HTTP/2."""
  head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
  return head + stream.to_bytes(4, "big") + payload


def _literal(name: str, value: str) -> bytes:
  """Returns a header field of HTTP/2, neither compressed nor indexed."""
  texts = (name.encode(), value.encode())
  return b"\0" + b"".join(bytes([len(x)]) + x for x in texts)


_HEADERS = {
  ":method": "POST",
  ":scheme": "http",
  ":path": "/tensorflow.WorkerService/GetStatus",
  ":authority": "server",
  "content-type": "application/grpc",
  "te": "trailers",
}
_DATA_KIND, _HEADERS_KIND, _SETTINGS_KIND, _PING_KIND = 0, 1, 4, 6
_REQUEST = (
  b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
  + _frame(_SETTINGS_KIND, 0, 0, b"")
  + _frame(_PING_KIND, 0, 0, b"who goes")
  + _frame(
    _HEADERS_KIND, 4, 1, b"".join(_literal(*x) for x in _HEADERS.items())
  )
  + _frame(_DATA_KIND, 1, 1, bytes(5))  # an empty message
)


def _is_answer(data: bytes) -> bool:
  """Returns whether a server has answered the ping or the request."""
  while len(data) >= 9:
    size, kind, flags = int.from_bytes(data[:3], "big"), data[3], data[4]
    stream = int.from_bytes(data[5:9], "big")
    if stream == 1 or (kind == _PING_KIND and flags & 1):
      return True
    data = data[9 + size :]
  return False


@functools.cache
def _say(*words: str) -> None:
  """Prints words, the first time."""
  print(*words, flush=True)


class _Attempt:
  """A connection to a server, from the first packet on."""

  def __init__(self, address: str):
    ip, _, port = address.rpartition(":")
    self.address, self.until = address, time.monotonic() + _SECS
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    self.socket = socket.socket(family)
    self.socket.setblocking(False)
    self.socket.connect_ex((ip, int(port)))
    self._is_connected, self._received = False, b""

  def proceed(self) -> bool:
    """Sends or receives what can be; returns whether more may come."""
    try:
      if not self._is_connected:
        self.socket.send(_REQUEST)  # raises before it is connected
        self._is_connected = True
        _say("connected", self.address)
      data = self.socket.recv(65536)
    except BlockingIOError:
      return True
    except OSError:
      data = b""
    self._received += data
    if _is_answer(self._received):
      _say("answered", self.address)
    elif self._is_connected and not data:
      _say("cut", self.address)
    return bool(data)


def _listening() -> set[str]:
  """Returns the addresses on loopback where any process listens."""
  ports = set()
  for path in ("/proc/net/tcp", "/proc/net/tcp6"):
    with contextlib.suppress(FileNotFoundError), open(path) as lines:
      next(lines)
      for line in lines:
        _, near, _, state, *_ = line.split()
        if state == "0A":
          ports.add(int(near.rpartition(":")[2], 16))
  return {f"127.0.0.1:{port}" for port in ports}


def main() -> None:
  """Asks until stdin ends."""
  uid, *addresses = sys.argv[1:]
  if int(uid) != os.geteuid():
    os.setgroups([])
    os.setuid(int(uid))
  before = _listening()
  poll = select.epoll()
  poll.register(0, select.EPOLLIN)
  attempts: dict[int, _Attempt] = {}
  _say("ready")
  while True:
    for number, attempt in list(attempts.items()):
      if time.monotonic() > attempt.until:
        attempts.pop(number).socket.close()
    open_at = collections.Counter(x.address for x in attempts.values())
    for address in addresses or _listening() - before:
      if open_at[address] < _MOST:
        attempt = _Attempt(address)
        attempts[attempt.socket.fileno()] = attempt
        events = select.EPOLLIN | select.EPOLLOUT | select.EPOLLET
        poll.register(attempt.socket, events)
    for number, _ in poll.poll(0.001):
      if number == 0:
        return
      if number in attempts and not attempts[number].proceed():
        attempts.pop(number).socket.close()


if __name__ == "__main__":
  main()
