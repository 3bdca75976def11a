# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sockets that TensorFlow's runtime has opened in this process."""

import contextlib
import os
import socket
from collections.abc import Collection, Iterator


def shut_down_connections(host: str, port: int) -> None:
  """Shuts down all connections of this process to a port of an IPv4 address."""
  # A call to a server that was stopped never returns, whatever timeout its
  # session has, unless its connection ends.
  for connection in _sockets():
    with contextlib.suppress(OSError, IndexError, TypeError):
      peer = connection.getpeername()
      if (peer[0].removeprefix("::ffff:"), peer[1]) == (host, port):
        connection.shutdown(socket.SHUT_RDWR)


def socket_numbers() -> dict[str, int]:
  """Returns the file descriptors of this process's sockets, by their inode."""
  found = {}
  for number in os.listdir("/proc/self/fd"):
    with contextlib.suppress(OSError):  # closed in the meantime
      name = os.readlink(f"/proc/self/fd/{number}")
      if name.startswith("socket:"):
        found[name] = int(number)
  return found


def duplicate(number: int) -> socket.socket:
  """Returns another socket object of a file descriptor; raises OSError."""
  copy = os.dup(number)
  try:
    return socket.socket(fileno=copy)
  except OSError:  # another file has taken the number
    os.close(copy)
    raise


def listeners(
  port: int, besides: Collection[socket.socket] = ()
) -> Iterator[socket.socket]:
  """Yields a duplicate of each socket of this process that listens on a port.

  Args:
    port: TCP port.
    besides: sockets to leave out.
  """
  for each in _sockets(besides):
    if is_inet(each, port) and accepts(each):
      yield each


def is_inet(found: socket.socket, port: int) -> bool:
  """Returns whether a socket is of IP, at a port of this machine."""
  families = (socket.AF_INET, socket.AF_INET6)
  return found.family in families and found.getsockname()[1] == port


def accepts(found: socket.socket) -> bool:
  """Returns whether a socket listens, so that it accepts connections."""
  return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockets(
  besides: Collection[socket.socket] = (),
) -> Iterator[socket.socket]:
  """Yields a duplicate of each socket of this process, closed afterwards."""
  left_out = {each.fileno() for each in besides}
  for number in {*socket_numbers().values()} - left_out:
    try:
      found = duplicate(number)
    except OSError:
      continue  # closed in the meantime
    with found:
      yield found
