# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks addresses of servers, and finds sockets that TensorFlow has opened."""

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Collection, Iterator

from palm_mtf.errors import UserError

ANY_ADDRESS = "0.0.0.0"


def split_address(setting: str, given: str) -> tuple[str, int]:
  """Splits "host:port"; a UserError names the flag or macro, `setting`."""
  host, _, port = given.rpartition(":")
  if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
    raise UserError(
      f'{setting} = "{given}": write ADDRESS:PORT, the port from 0 (any that '
      'is free) to 65535, as in "127.0.0.1:2222".'
    )
  return host, int(port)


def resolve(setting: str, host: str) -> str:
  """Returns a host's IPv4 address; if none, a UserError names `setting`."""
  try:
    return socket.gethostbyname(host)
  except (OSError, UnicodeError):
    raise UserError(
      f'{setting}: the name "{host}" has no IPv4 address on this host; correct '
      "it, add it to /etc/hosts, or give the address itself."
    ) from None


def is_loopback(ip: str) -> bool:
  """Returns whether an IPv4 address is a loopback address."""
  return ipaddress.ip_address(ip).is_loopback


def check_client(address: str) -> None:
  """Raises UserError if the client's own server cannot listen at `address`."""
  host, _, port = address.partition(":")
  ip = resolve("CLIENT_ADDRESS", host)
  check_free("CLIENT_ADDRESS", ip, int(port or 0))


def check_free(setting: str, ip: str, port: int) -> None:
  """Raises UserError unless this host has address `ip` and `port` is free."""
  with socket.socket() as trial:
    # Set SO_REUSEADDR, as TensorFlow does. Otherwise the port of a server that
    # has just ended would count as in use for a minute.
    trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      # The first bind fails if this host does not have the address. The second
      # tries the port on all addresses, because TensorFlow listens on them all.
      trial.bind((ip, 0))
      with socket.socket() as wider:
        wider.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        wider.bind((ANY_ADDRESS, port))
    except OSError as error:
      raise explain_bind_error(setting, ip, port, error) from None


def explain_bind_error(
  setting: str, ip: str, port: int, error: OSError
) -> UserError:
  """Returns the error that says why this host cannot listen on a port."""
  why = {
    errno.EADDRINUSE: f"port {port} is in use; give another, or 0 for any",
    errno.EADDRNOTAVAIL: "this host has no such address",
    errno.EACCES: f"port {port} needs rights; give one from 1024",
  }.get(error.errno, os.strerror(error.errno or 0))
  return UserError(f'{setting} = "{ip}:{port}": {why}.')


def explain_start_error(address: str, error: Exception) -> UserError:
  """Returns the error that says why a server cannot listen at an address."""
  if isinstance(error, OSError) and error.errno != errno.EADDRINUSE:
    why = (
      "this system does not let a server be restricted to one address and, "
      f"on loopback, one user ({error.strerror}), and it would listen to "
      "all; use pods in process, or another system."
    )
  else:
    why = (
      "another process has just begun to listen there; give another port, "
      "or 0 for any."
    )
  return UserError(f"{address}: {why}")


def listening_address(given: str, allow_any_address: bool) -> tuple[str, int]:
  """Returns the IPv4 address and port at which `--listen` lets a server listen.

  Raises UserError if this host cannot listen there, if the address is "0.0.0.0"
  and not allowed, or if a host name but localhost has a loopback address.
  """
  host, port = split_address("--listen", given)
  ip = resolve("--listen", host)
  if ip == ANY_ADDRESS and not allow_any_address:
    raise UserError(
      f'--listen = "{given}" lets every host that can reach this host run '
      "programs on it; give one address, or add --allow_any_address."
    )
  # Refuse a loopback address that the user may not mean: on some systems
  # /etc/hosts gives the host's own name the address 127.0.1.1.
  is_meant = host.startswith("localhost") or host.replace(".", "").isdigit()
  if is_loopback(ip) and not is_meant:
    raise UserError(
      f'--listen = "{given}": "{host}" is {ip} on this host, which no other '
      "host can reach; give an address that others can reach, or localhost."
    )
  check_free("--listen", ip, port)
  return ip, port


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
  """Returns {"socket:[INODE]": descriptor} of this process's sockets."""
  found = {}
  for number in os.listdir("/proc/self/fd"):
    with contextlib.suppress(OSError):  # the file has been closed
      name = os.readlink(f"/proc/self/fd/{number}")
      if name.startswith("socket:"):
        found[name] = int(number)
  return found


def duplicate(number: int) -> socket.socket:
  """Duplicates a file descriptor's socket; OSError if it is no socket."""
  copy = os.dup(number)
  try:
    return socket.socket(fileno=copy)
  except OSError:  # the number now belongs to another file
    os.close(copy)
    raise


def listeners(
  port: int, besides: Collection[socket.socket] = ()
) -> Iterator[socket.socket]:
  """Yields duplicates of a port's listening sockets, except `besides`."""
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
  """Yields a duplicate of each socket; closes it when the next is taken."""
  left_out = {each.fileno() for each in besides}
  for number in {*socket_numbers().values()} - left_out:
    try:
      found = duplicate(number)
    except OSError:
      continue  # the file has been closed, or is no socket any more
    with found:
      yield found
