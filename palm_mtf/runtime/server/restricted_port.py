# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A port that nobody can use before its server limits who may connect.

A TensorFlow server listens on every address of a machine, and runs any program,
with access to files, for anyone who connects. The server accepts connections as
soon as it is made, before its sockets can be found and restricted. Therefore
this module first opens its own sockets on the port, called guards. While guards
listen, the kernel gives every connection to a guard, which drops the packets.

Every user of a machine can connect to its loopback interface, and TensorFlow's
protocol has no authentication. Therefore the kernel drops the data of a new
connection over loopback, until /proc/net/tcp shows that this process's user
owns the other end. This needs no privileges.
"""

import collections
import contextlib
import ctypes
import errno
import functools
import ipaddress
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from palm_mtf.runtime.addresses import (
  accepts,
  duplicate,
  is_inet,
  is_loopback,
  listeners,
  socket_numbers,
)

_REUSE_PORT = "TF_GRPC_REUSE_PORT"
# Socket options of Linux that Python's socket module lacks.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER, _SO_ATTACH_REUSEPORT_CBPF = 26, 27, 51
# A program of the Berkeley packet filter: instructions (code, number of
# instructions to skip if true, number to skip if false, operand).
_Program = Sequence[tuple[int, int, int, int]]
_LOAD_BYTE, _LOAD_WORD, _LOAD_LENGTH, _TO_INDEX = 0x30, 0x20, 0x80, 0x07
_AND, _SHIFT_RIGHT, _SUBTRACT, _JUMP_IF_EQUAL = 0x54, 0x74, 0x1C, 0x15
_RETURN = 0x06
# The last instruction of a filter: accept the whole packet, or drop it.
_TAKE, _DROP = (_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)
# Filter for a new connection whose user is not known yet: accepts only packets
# without data (handshakes and acknowledgements). Such a packet is as long as
# its TCP header: 4 bytes times the upper 4 bits of byte 12.
_TAKE_WITHOUT_DATA = (
  (_LOAD_BYTE, 0, 0, 12),
  (_SHIFT_RIGHT, 0, 0, 2),
  (_AND, 0, 0, 0x3C),
  (_TO_INDEX, 0, 0, 0),
  (_LOAD_LENGTH, 0, 0, 0),
  (_SUBTRACT, 0, 0, 0),
  (_JUMP_IF_EQUAL, 0, 1, 0),
  _TAKE,
  _DROP,
)
# Pause between checks for new connections. Until a check admits a connection,
# its packets are dropped; the peer resends them after 0.2 seconds.
_PAUSE_SECS = 0.05
# The number of users that /proc/self/uid_map maps if it maps every user.
_ALL_UIDS = 2**32 - 1
_ESTABLISHED = "01"


@contextlib.contextmanager
def restricted_port(ip: str, port: int) -> Iterator[int]:
  """Drops a port's packets while the body makes a server; then limits access.

  Yields the port that the body has to use. A client that connects during the
  body has to connect again afterwards. Call this before
  `restrict_later_listeners`, which would make guards accept connections.

  Args:
    ip: IPv4 address at which clients may connect to the server. If it is a
      loopback address, only this process's user may connect, and only over the
      loopback interface.
    port: TCP port; 0 is any free port.

  Raises OSError if another socket has the port (EADDRINUSE), or the system
  cannot limit who may connect.
  """
  assert _listening is None, "its thread would let guards accept connections"
  with contextlib.ExitStack() as stack:
    guards = []
    # The kernel groups sockets that share a port by address family, so each
    # family needs a guard. gRPC listens on "::", which includes IPv4, if the
    # loopback interface has an IPv6 address; otherwise on "0.0.0.0".
    dual = [socket.AF_INET6] if socket.has_dualstack_ipv6() else []
    families = [*dual, socket.AF_INET]
    # The first guard binds without SO_REUSEPORT, so that the bind fails if
    # another socket has the port.
    guarded = [(families[0], False), *((x, True) for x in families)]
    for family, is_shared in guarded:
      guard = stack.enter_context(socket.socket(family))
      port = _listen(guard, port, is_shared)
      guards.append(guard)
    with _tensorflow_shares_ports():
      yield port
    for listener in listeners(port, besides=guards):
      if is_loopback(ip):
        restrict_to_loopback(listener)
      else:
        restrict_to_address(listener, ip)
    if is_loopback(ip):
      admit_own_user(port)


@contextlib.contextmanager
def _tensorflow_shares_ports() -> Iterator[None]:
  """Lets TensorFlow's servers in the body share a port with the guards."""
  before = os.environ.get(_REUSE_PORT)
  os.environ[_REUSE_PORT] = "1"
  try:
    yield
  finally:
    del os.environ[_REUSE_PORT]
    if before is not None:
      os.environ[_REUSE_PORT] = before


def _listen(guard: socket.socket, port: int, is_shared: bool) -> int:
  """Makes `guard` listen on a port (0: any free port); returns the port."""
  _attach_filter(guard, [_DROP])
  guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, is_shared)
  if guard.family == socket.AF_INET6:
    guard.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
  guard.bind(("", port))
  guard.listen()
  guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
  if is_shared:
    # The server's sockets will join the guard's group of sockets on this port.
    # The filter returns the index, in that group, of the socket that gets a new
    # connection: 0, the guard.
    _attach_filter(guard, [(_RETURN, 0, 0, 0)], _SO_ATTACH_REUSEPORT_CBPF)
  return guard.getsockname()[1]


def restrict_to_loopback(listener: socket.socket) -> None:
  """Restricts a listening socket to connections over the loopback interface.

  Drops the data of a new connection until a thread admits the connection.
  """
  listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
  _attach_filter(listener, _TAKE_WITHOUT_DATA)


def restrict_to_address(listener: socket.socket, ip: str) -> None:
  """Restricts a listening socket to packets for one IPv4 address."""
  network_header = 0xFFF00000  # SKF_NET_OFF, the offset of the IP header
  program = (
    (_LOAD_BYTE, 0, 0, network_header),
    (_SHIFT_RIGHT, 0, 0, 4),
    (_JUMP_IF_EQUAL, 0, 3, 4),
    (_LOAD_WORD, 0, 0, network_header + 16),
    (_JUMP_IF_EQUAL, 0, 1, int.from_bytes(socket.inet_aton(ip))),
    _TAKE,
    _DROP,
  )
  _attach_filter(listener, program)


def _attach_filter(
  to: socket.socket, program: _Program, option: int = _SO_ATTACH_FILTER
) -> None:
  """Attaches a packet filter, which connections accepted by `to` inherit."""
  code = b"".join(struct.pack("HBBI", *each) for each in program)
  buffer = ctypes.create_string_buffer(code)
  both = struct.pack("HP", len(program), ctypes.addressof(buffer))
  to.setsockopt(socket.SOL_SOCKET, option, both)


def admit_own_user(port: int) -> None:
  """Lets a thread admit this user's connections and end all others.

  Call `restrict_to_loopback` with the port's listening sockets first. Raises
  OSError if the system cannot tell which user has opened a connection.
  """
  _check_own_uid()
  _uids()
  _known[port] = set()
  _start_admitting(os.getpid())


# {port of this process: names of sockets that the thread has already checked}.
_known: dict[int, set[str]] = {}
# Names of the sockets that need no check any more, because they listen already
# or never will; None before `restrict_later_listeners` is called.
_listening: set[str] | None = None


def restrict_later_listeners() -> None:
  """Restricts every socket with which this process later begins to listen.

  Libraries open such sockets themselves: JAX's collectives between CPUs, for
  example, answer every user. At most 0.05 seconds after a socket begins to
  listen, it is restricted to the loopback interface and to this process's user,
  and connections of other users are ended. Raises OSError if the system cannot
  tell which user has opened a connection.
  """
  global _listening
  _check_own_uid()
  found = set()
  for name, number in socket_numbers().items():
    with contextlib.suppress(OSError), duplicate(number) as copy:
      if accepts(copy):
        found.add(name)
  _listening = found
  _start_admitting(os.getpid())


@functools.cache
def _start_admitting(pid: int) -> None:
  # One thread serves all ports, because it lists all files of the process.
  threading.Thread(target=_admit, daemon=True).start()


def _check_own_uid() -> None:
  """Raises OSError if this process's user id may stand for other users too."""
  # In a user namespace, overflowuid stands for every user that is not mapped.
  with open("/proc/sys/kernel/overflowuid") as file:
    if os.geteuid() != int(file.read()):
      return
  with open("/proc/self/uid_map") as lines:
    if sum(int(line.split()[2]) for line in lines) < _ALL_UIDS:
      raise OSError(
        errno.EPERM,
        f"user {os.geteuid()} stands for all users that this user namespace "
        "does not map",
      )


def _admit() -> None:
  while True:
    time.sleep(_PAUSE_SECS)
    # If this process cannot open more files, the next iteration does the rest.
    with contextlib.suppress(OSError):
      numbers = socket_numbers()
      if _listening is not None:
        _restrict_new(numbers, _listening)
      _admit_new(numbers, {**_known})


def _restrict_new(numbers: Mapping[str, int], seen: set[str]) -> None:
  """Restricts listeners of `numbers`, {name: descriptor}, not yet in `seen`."""
  seen.intersection_update(numbers)
  for name in numbers.keys() - seen:
    with contextlib.suppress(OSError), duplicate(numbers[name]) as copy:
      is_ip = copy.family in (socket.AF_INET, socket.AF_INET6)
      if is_ip and accepts(copy):
        restrict_to_loopback(copy)
        _known[copy.getsockname()[1]] = set()
      elif is_ip:
        copy.getpeername()  # if this fails, check again: it may listen later
      seen.add(name)


def _admit_new(
  numbers: Mapping[str, int], known: Mapping[int, set[str]]
) -> None:
  """Admits or ends new connections to the ports of `known`.

  `known` is {port: names of sockets that are not new}; adds those in `numbers`.
  """
  # Read the users after the sockets, so that every listed socket has a user.
  uids = functools.cache(_uids)
  for port, names in known.items():
    names.intersection_update(numbers)
    for name in numbers.keys() - names:
      # By now the socket may be closed, and its descriptor another file's.
      with contextlib.suppress(OSError), duplicate(numbers[name]) as copy:
        if name == f"socket:[{os.fstat(copy.fileno()).st_ino}]":
          if is_inet(copy, port) and not accepts(copy):
            _admit_or_end(copy, uids())
          names.add(name)


def _admit_or_end(
  connection: socket.socket, uids: Mapping[tuple[bytes, bytes], set[int]]
) -> None:
  with contextlib.suppress(OSError):  # the connection may have ended
    near, far = connection.getsockname(), connection.getpeername()
    ends = _end_bytes(*far[:2]), _end_bytes(*near[:2])
    if uids.get(ends) == {os.geteuid()}:
      connection.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
    else:
      connection.shutdown(socket.SHUT_RDWR)


def _uids() -> dict[tuple[bytes, bytes], set[int]]:
  """Returns {(local end, remote end): user ids} of TCP connections."""
  found = collections.defaultdict(set)
  for path in ("/proc/net/tcp", "/proc/net/tcp6"):
    with contextlib.suppress(FileNotFoundError), open(path) as lines:
      next(lines)
      for line in lines:
        _, near, far, state, _, _, _, uid, *_ = line.split()
        if state == _ESTABLISHED:
          found[_parse_end(near), _parse_end(far)].add(int(uid))
  return found


def _end_bytes(ip: str, port: int) -> bytes:
  """Packs an end of a connection: 16 bytes of IPv6 address, 2 bytes of port."""
  address = ipaddress.ip_address(ip)
  if address.version == 4:
    address = ipaddress.ip_address(f"::ffff:{ip}")
  return address.packed + port.to_bytes(2)


def _parse_end(text: str) -> bytes:
  """Packs "0100007F:08AE", one end in /proc/net/tcp, as `_end_bytes` does."""
  # Each 4-byte word of the address is a little-endian number.
  words, _, port = text.partition(":")
  numbers = bytes.fromhex(words)
  packed = b"".join(numbers[i : i + 4][::-1] for i in range(0, len(numbers), 4))
  if len(packed) == 4:
    packed = bytes(10) + b"\xff\xff" + packed
  return packed + bytes.fromhex(port)
