# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A link on loopback that a test cuts or silences while bytes cross it."""

import contextlib
import socket
import threading
from pathlib import Path

CHUNK_BYTES = 16384


class Relay:
  """Listens on a port and passes on bytes in both directions.

  Attributes:
    address: "127.0.0.1:<port>", on which the relay listens.
    failed: an event that is set when the relay fails its connections.
  """

  def __init__(self, to: str):
    """Makes a relay to "host:port"."""
    self._to = to
    self._listener = socket.create_server(("127.0.0.1", 0))
    self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
    self._sockets: list[socket.socket] = []
    self._bytes_left, self._closes = float("inf"), False
    self._silenced: int | None = None
    self.failed = threading.Event()
    threading.Thread(target=self._accept, daemon=True).start()

  def fail_after(self, num_bytes: int, closes: bool) -> None:
    """Passes on this many more bytes, then closes or silences connections."""
    self._closes, self._bytes_left = closes, num_bytes

  def silence(self, process: int | None) -> None:
    """Silences one process: receives its bytes but drops them; None ends it."""
    self._silenced = process

  def close(self) -> None:
    """Closes all connections, and accepts no more."""
    self._listener.close()
    for each in self._sockets:
      with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
      each.close()

  def _accept(self) -> None:
    with contextlib.suppress(OSError):  # closed
      while True:
        near, _ = self._listener.accept()
        host, _, port = self._to.rpartition(":")
        try:
          far = socket.create_connection((host, int(port)))
        except OSError:
          near.close()
          continue
        self._sockets += [near, far]
        peer = near.getpeername()[1]
        for ends in ((near, far), (far, near)):
          threading.Thread(
            target=self._pass_on, args=[*ends, peer], daemon=True
          ).start()

  def _pass_on(
    self, source: socket.socket, sink: socket.socket, peer: int
  ) -> None:
    with contextlib.suppress(OSError):
      while data := source.recv(CHUNK_BYTES):
        if self._silenced and peer in _ports_of(self._silenced):
          continue
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
          self.failed.set()
          if self._closes:
            self.close()
          continue  # silent: receives bytes and drops them
        sink.sendall(data)
      sink.shutdown(socket.SHUT_WR)


def _ports_of(process: int) -> set[int]:
  """Returns the local ports of a process's TCP connections."""
  inodes = set()
  for path in Path(f"/proc/{process}/fd").iterdir():
    with contextlib.suppress(OSError):
      inodes.add(path.readlink().name.removeprefix("socket:[").rstrip("]"))
  rows = [
    line.split()
    for name in ("tcp", "tcp6")
    for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
  ]
  return {int(x[1].rpartition(":")[2], 16) for x in rows if x[9] in inodes}
