# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sockets that TensorFlow's runtime has opened in this process."""

import contextlib
import os
import socket
from collections.abc import Collection, Iterator


def shut_down_connections(address: str) -> None:
  """Shuts down all connections of this process to "IPv4 address:port"."""
  # A call to a server whose process is stopped (SIGSTOP) never returns,
  # whatever the session's timeout, unless the call's connection ends.
  for connection in _sockets():
    with contextlib.suppress(OSError, ValueError, AttributeError):
      ip, port, *_ = connection.getpeername()
      if f"{ip.removeprefix('::ffff:')}:{port}" == address:
        connection.shutdown(socket.SHUT_RDWR)


def socket_numbers() -> dict[str, int]:
  """Returns {"socket:[INODE]": file descriptor} for this process's sockets."""
  found = {}
  for number in os.listdir("/proc/self/fd"):
    with contextlib.suppress(OSError):  # closed in the meantime
      name = os.readlink(f"/proc/self/fd/{number}")
      if name.startswith("socket:"):
        found[name] = int(number)
  return found


def duplicate(number: int) -> socket.socket:
  """Duplicates a file descriptor; raises OSError if it is no socket."""
  copy = os.dup(number)
  try:
    return socket.socket(fileno=copy)
  except OSError:  # the number now belongs to another file
    os.close(copy)
    raise


def listeners(
  port: int, besides: Collection[socket.socket] = ()
) -> Iterator[socket.socket]:
  """Yields duplicates of this process's sockets that listen on a TCP port.

  Each duplicate is closed when the next one is taken. Sockets in `besides` are
  left out.
  """
  for each in _sockets(besides):
    if is_inet(each, port) and accepts(each):
      yield each


def is_inet(found: socket.socket, port: int) -> bool:
  """Returns whether a socket is an IP socket whose local port is `port`."""
  families = (socket.AF_INET, socket.AF_INET6)
  return found.family in families and found.getsockname()[1] == port


def accepts(found: socket.socket) -> bool:
  """Returns whether a socket is a listening socket."""
  return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockets(
  besides: Collection[socket.socket] = (),
) -> Iterator[socket.socket]:
  """Yields a duplicate of each socket, and closes it when the next is taken."""
  left_out = {each.fileno() for each in besides}
  for number in {*socket_numbers().values()} - left_out:
    try:
      found = duplicate(number)
    except OSError:
      continue  # closed in the meantime
    with found:
      yield found
