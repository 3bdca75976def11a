# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Keeps the sockets of TensorFlow's runtime in this process to what we allow.

Whoever reaches such a server may run any program on it, files included, and
TensorFlow makes it listen on all of the machine's addresses. So its socket is
fenced between its making and the first answer. And a call to a server that has
stopped lasts for ever, whatever bound is asked for, unless its connection ends.
"""

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator

_SO_ATTACH_FILTER = 26
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT = 0x30, 0x20, 0x74
_JUMP_IF_EQUAL, _RETURN = 0x15, 0x06


def keep_to_this_machine(port: int) -> None:
  """Lets the sockets of this process that listen on `port` hear loopback only.

  Raises:
    OSError: the kernel refuses.
  """
  for listener in _sockets():
    if _is_listening(listener) and listener.getsockname()[1] == port:
      device = b"lo\0"
      listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device)


def keep_to_address(port: int, ip: str) -> None:
  """Lets those sockets hear what is sent to one IPv4 address only.

  The kernel drops the rest unanswered, by a filter of the Berkeley packet
  filter's machine: IP version 4, and `ip` as the destination.

  Raises:
    OSError: the kernel refuses.
  """
  network_header = 0xFFF00000  # SKF_NET_OFF
  program = (
    (_LOAD_BYTE, 0, 0, network_header),
    (_SHIFT_RIGHT, 0, 0, 4),
    (_JUMP_IF_EQUAL, 0, 3, 4),
    (_LOAD_WORD, 0, 0, network_header + 16),
    (_JUMP_IF_EQUAL, 0, 1, int.from_bytes(socket.inet_aton(ip))),
    (_RETURN, 0, 0, 0xFFFFFFFF),
    (_RETURN, 0, 0, 0),
  )
  code = b"".join(struct.pack("HBBI", *each) for each in program)
  buffer = ctypes.create_string_buffer(code)
  both = struct.pack("HP", len(program), ctypes.addressof(buffer))
  for listener in _sockets():
    if _is_listening(listener) and listener.getsockname()[1] == port:
      listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, both)


def cut(host: str, port: int) -> None:
  """Ends every connection of this process to a port of a host, given by IP."""
  for connection in _sockets():
    with contextlib.suppress(OSError, IndexError, TypeError):
      peer = connection.getpeername()
      if (peer[0].removeprefix("::ffff:"), peer[1]) == (host, port):
        connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[socket.socket]:
  """Yields a copy of each socket of this process, closed afterwards."""
  for name in os.listdir("/proc/self/fd"):
    try:
      copy = os.dup(int(name))
    except OSError:
      continue  # closed meanwhile
    try:
      found = socket.socket(fileno=copy)
    except OSError:  # no socket
      os.close(copy)
      continue
    with found:
      yield found


def _is_listening(found: socket.socket) -> bool:
  is_inet = found.family in (socket.AF_INET, socket.AF_INET6)
  return is_inet and bool(
    found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
  )
