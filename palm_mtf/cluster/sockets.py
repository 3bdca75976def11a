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
from collections.abc import Collection, Iterator, Sequence

# Linux's numbers of the options, and codes of the Berkeley packet filter.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER, _SO_ATTACH_REUSEPORT_CBPF = 26, 27, 51
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT = 0x30, 0x20, 0x74
_JUMP_IF_EQUAL, _RETURN = 0x15, 0x06
# Ends of a filter's program: the whole packet is taken, or it is dropped.
RETURN_ALL, RETURN_NONE = (_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)


def restrict_to_loopback(listener: socket.socket) -> None:
  """Restricts a socket that listens to the loopback interface."""
  listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")


def restrict_to_address(listener: socket.socket, ip: str) -> None:
  """Restricts a socket that listens to packets for one IPv4 address."""
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
  attach_filter(listener, program)


def attach_filter(
  to: socket.socket, program: Sequence[tuple[int, int, int, int]]
) -> None:
  """Attaches a program of the Berkeley packet filter to a socket.

  Sockets of connections that a listening socket accepts inherit the program.
  """
  _attach(to, _SO_ATTACH_FILTER, program)


def select_first(of: socket.socket) -> None:
  """Gives connections to a shared port to the first socket that listens there.

  Args:
    of: socket that listens, with the option SO_REUSEPORT. Concerns the sockets
      of its family, address and user that share its port, later ones too.
  """
  # The program returns the index of a socket.
  _attach(of, _SO_ATTACH_REUSEPORT_CBPF, [(_RETURN, 0, 0, 0)])


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


def listeners(
  port: int, besides: Collection[socket.socket] = ()
) -> Iterator[socket.socket]:
  """Yields a duplicate of each socket of this process that listens on a port.

  Args:
    port: TCP port.
    besides: sockets to leave out.
  """
  for each in _sockets(besides):
    is_inet = each.family in (socket.AF_INET, socket.AF_INET6)
    if (
      is_inet
      and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
      and each.getsockname()[1] == port
    ):
      yield each


def _attach(
  to: socket.socket, option: int, program: Sequence[tuple[int, int, int, int]]
) -> None:
  code = b"".join(struct.pack("HBBI", *each) for each in program)
  buffer = ctypes.create_string_buffer(code)
  both = struct.pack("HP", len(program), ctypes.addressof(buffer))
  to.setsockopt(socket.SOL_SOCKET, option, both)


def _sockets(
  besides: Collection[socket.socket] = (),
) -> Iterator[socket.socket]:
  """Yields a duplicate of each socket of this process, closed afterwards."""
  left_out = {each.fileno() for each in besides}
  for number in {*socket_numbers().values()} - left_out:
    try:
      found = duplicate(number)
    except OSError:
      continue  # closed meanwhile
    with found:
      yield found
