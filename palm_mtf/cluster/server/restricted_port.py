# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A port that nobody reaches before the server that starts there is restricted.

A TensorFlow server listens on every address and accepts connections as soon as
it is made, before its sockets can be found and restricted. So sockets of this
module, the guards, listen on the port first. As long as they do, the kernel
gives every connection to a guard, and the guard drops its packets.
"""

import contextlib
import os
import socket
from collections.abc import Iterator

from palm_mtf.cluster.addresses import is_loopback
from palm_mtf.cluster.server.admission import (
  admit_own_user,
  restrict_to_admitted,
)
from palm_mtf.cluster.sockets import (
  RETURN_NONE,
  attach_filter,
  listeners,
  restrict_to_address,
  restrict_to_loopback,
  select_first,
)

_REUSE_PORT = "TF_GRPC_REUSE_PORT"


@contextlib.contextmanager
def restricted_port(ip: str, port: int) -> Iterator[int]:
  """Drops what arrives at a port while a server starts there; restricts it.

  The `with` body makes the server. A connection that is attempted meanwhile
  reaches the server only if it is attempted again after the body.

  Args:
    ip: IPv4 address that the server is restricted to. If it is a loopback
      address, the server is restricted to the loopback interface, and to
      connections of this process's user.
    port: TCP port; 0 is any free port.

  Yields:
    The port.

  Raises:
    OSError: another socket has the port (EADDRINUSE), or the system cannot
      restrict sockets.
  """
  with contextlib.ExitStack() as stack:
    guards = []
    # gRPC listens on "::", IPv4 included, where the loopback interface has an
    # IPv6 address, and on "0.0.0.0" elsewhere. The kernel groups sockets that
    # share a port by their family: each family has its own guard.
    dual = [socket.AF_INET6] if socket.has_dualstack_ipv6() else []
    families = [*dual, socket.AF_INET]
    # The first guard takes the port only if no other socket has it, so that two
    # servers never share a port. The next ones share it with that guard.
    shares = [False, *[True] * len(families)]
    for family, is_shared in zip([families[0], *families], shares, strict=True):
      guard = stack.enter_context(socket.socket(family))
      port = _listen(guard, port, is_shared)
      guards.append(guard)
    with _tensorflow_shares_ports():
      yield port
    for listener in listeners(port, besides=guards):
      if is_loopback(ip):
        restrict_to_loopback(listener)
        restrict_to_admitted(listener)
      else:
        restrict_to_address(listener, ip)
    if is_loopback(ip):
      admit_own_user(port)


@contextlib.contextmanager
def _tensorflow_shares_ports() -> Iterator[None]:
  """Gives sockets of TensorFlow servers made by the body SO_REUSEPORT."""
  before = os.environ.get(_REUSE_PORT)
  os.environ[_REUSE_PORT] = "1"
  try:
    yield
  finally:
    if before is None:
      del os.environ[_REUSE_PORT]
    else:
      os.environ[_REUSE_PORT] = before


def _listen(guard: socket.socket, port: int, is_shared: bool) -> int:
  """Makes a guard listen on a port, or on any if it is 0; returns the port."""
  attach_filter(guard, [RETURN_NONE])
  guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, is_shared)
  if guard.family == socket.AF_INET6:
    guard.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
  guard.bind(("", port))
  guard.listen()
  guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
  if is_shared:
    # The server's sockets join the group of the guard of their family, whose
    # first member gets all connections of the group.
    select_first(guard)
  return guard.getsockname()[1]
