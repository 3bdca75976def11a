# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sockets of TensorFlow's runtime in this process: restricted, or shut down.

TensorFlow's servers listen on every address of a machine, and run any program
for whoever reaches them, files included.
"""

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator, Sequence

# Linux's numbers of the options, and codes of the Berkeley packet filter.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT = 0x30, 0x20, 0x74
_JUMP_IF_EQUAL, _RETURN = 0x15, 0x06
# Ends of a filter's program: the whole packet is taken, or it is dropped.
RETURN_ALL, RETURN_NONE = (_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)


def restrict_to_loopback(port: int) -> None:
  """Restricts the sockets that listen on `port` to the loopback interface."""
  for listener in listeners(port):
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")


def restrict_to_address(port: int, ip: str) -> None:
  """Restricts the sockets that listen on `port` to packets for one address."""
  # Drops packets other than IP version 4, and those to another destination.
  network_header = 0xFFF00000  # SKF_NET_OFF
  program = (
    (_LOAD_BYTE, 0, 0, network_header),
    (_SHIFT_RIGHT, 0, 0, 4),
    (_JUMP_IF_EQUAL, 0, 3, 4),
    (_LOAD_WORD, 0, 0, network_header + 16),
    (_JUMP_IF_EQUAL, 0, 1, int.from_bytes(socket.inet_aton(ip))),
    RETURN_ALL,
    RETURN_NONE,
  )
  for listener in listeners(port):
    attach_filter(listener, program)


def attach_filter(
  to: socket.socket, program: Sequence[tuple[int, int, int, int]]
) -> None:
  """Attaches a program of the Berkeley packet filter to a socket."""
  code = b"".join(struct.pack("HBBI", *each) for each in program)
  buffer = ctypes.create_string_buffer(code)
  both = struct.pack("HP", len(program), ctypes.addressof(buffer))
  to.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, both)


def detach_filter(of: socket.socket) -> None:
  """Detaches the program of a socket; raises OSError where it has none."""
  of.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def shut_down_connections(host: str, port: int) -> None:
  """Shuts down all connections of this process to a port of an IPv4 address."""
  # A call to a server that was stopped lasts for ever, whatever timeout its
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
    with contextlib.suppress(OSError):  # closed meanwhile
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


def listeners(port: int) -> Iterator[socket.socket]:
  """Yields a duplicate of each socket here that listens on a port."""
  for each in _sockets():
    is_inet = each.family in (socket.AF_INET, socket.AF_INET6)
    if (
      is_inet
      and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
      and each.getsockname()[1] == port
    ):
      yield each


def _sockets() -> Iterator[socket.socket]:
  """Yields a duplicate of each socket of this process, closed afterwards."""
  for number in socket_numbers().values():
    try:
      found = duplicate(number)
    except OSError:
      continue  # closed meanwhile
    with found:
      yield found
