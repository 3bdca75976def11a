# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Admission to a server on loopback: connections of this process's user alone.

Every user of a machine reaches its loopback, and TensorFlow asks nobody who he
is. So the kernel drops what is sent over a new connection, until /proc/net/tcp
has said whose the socket at its other end is. Needs no rights of root.
"""

import contextlib
import ipaddress
import os
import select
import socket
import threading
import time
from collections.abc import Iterator

from palm_mtf.cluster.sockets import (
  RETURN_ALL,
  RETURN_NONE,
  attach_filter,
  detach_filter,
  duplicate,
  listeners,
  socket_numbers,
)

# A packet that was dropped comes again after 0.2 seconds.
_PAUSE_SECS = 0.05
_ESTABLISHED = "01"
# Codes of the Berkeley packet filter.
_LOAD_BYTE, _LOAD_LENGTH, _TO_INDEX, _FROM_INDEX = 0x30, 0x80, 0x07, 0x87
_AND, _SHIFT_RIGHT, _SUBTRACT, _JUMP_IF_EQUAL = 0x54, 0x74, 0x1C, 0x15
# Accepts packets whose length is that of their TCP header, 4 bytes times the
# upper half of byte 12: handshakes and acknowledgements.
_WITHOUT_DATA = (
  (_LOAD_BYTE, 0, 0, 12),
  (_SHIFT_RIGHT, 0, 0, 2),
  (_AND, 0, 0, 0x3C),
  (_TO_INDEX, 0, 0, 0),
  (_LOAD_LENGTH, 0, 0, 0),
  (_SUBTRACT, 0, 0, 0),
  (_JUMP_IF_EQUAL, 0, 1, 0),
  RETURN_ALL,
  RETURN_NONE,
)


def admit_own_user(port: int) -> None:
  """Admits connections of this user alone to `port`, from now on.

  Args:
    port: TCP port where this process listens, and has accepted nothing yet.

  Raises:
    OSError: the system has no such filter.
  """
  for listener in listeners(port):
    # A connection takes the filter over from its listener. Those of before it
    # are ended.
    attach_filter(listener, _WITHOUT_DATA)
    while select.select([listener], [], [], 0)[0]:
      with contextlib.suppress(OSError):
        listener.accept()[0].close()
  for _ in _owners():  # raises where /proc says nothing
    break
  threading.Thread(target=_admit, args=[port], daemon=True).start()


def _admit(port: int) -> None:
  """Judges each connection to `port` once, as long as this process lives."""
  judged: set[str] = set()
  while True:
    time.sleep(_PAUSE_SECS)
    numbers = socket_numbers()
    for name in numbers.keys() - judged:
      # It may have ended meanwhile.
      with contextlib.suppress(OSError), duplicate(numbers[name]) as connection:
        _judge(connection, port)
    judged = set(numbers)


def _judge(connection: socket.socket, port: int) -> None:
  """Admits a connection to `port` or shuts it down; leaves other sockets."""
  if connection.family not in (socket.AF_INET, socket.AF_INET6):
    return
  near = connection.getsockname()
  if near[1] != port or connection.getsockopt(
    socket.SOL_SOCKET, socket.SO_ACCEPTCONN
  ):
    return
  try:
    ends = _end(*connection.getpeername()[:2]), _end(*near[:2])
    is_own = dict(_owners()).get(ends) == os.geteuid()
  except OSError:
    is_own = False
  if is_own:
    detach_filter(connection)
  else:
    connection.shutdown(socket.SHUT_RDWR)


def _owners() -> Iterator[tuple[tuple[bytes, bytes], int]]:
  """Yields the near and the far end of every connection here, and its uid."""
  for path in ("/proc/net/tcp", "/proc/net/tcp6"):
    with contextlib.suppress(FileNotFoundError), open(path) as lines:
      next(lines)
      for line in lines:
        _, near, far, state, _, _, _, uid, *_ = line.split()
        if state == _ESTABLISHED:
          yield (_kernel_end(near), _kernel_end(far)), int(uid)


def _end(ip: str, port: int) -> bytes:
  """Returns 16 bytes of an address, as of IPv6, and 2 of a port."""
  address = ipaddress.ip_address(ip)
  if address.version == 4:
    address = ipaddress.ip_address(f"::ffff:{ip}")
  return address.packed + port.to_bytes(2)


def _kernel_end(text: str) -> bytes:
  """Returns the bytes of an end as the kernel writes it, "0100007F:08AE"."""
  # Words of 4 bytes, each as a number of this machine, whose lowest byte TCP
  # has first.
  words, _, port = text.partition(":")
  numbers = bytes.fromhex(words)
  packed = b"".join(numbers[i : i + 4][::-1] for i in range(0, len(numbers), 4))
  if len(packed) == 4:
    packed = bytes(10) + b"\xff\xff" + packed
  return packed + bytes.fromhex(port)
