# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The socket that a server listens on."""

import ipaddress
import logging
import socket

from palm_mtf.errors import UserError
from palm_mtf.runtime.addresses import explain_bind_error, split_address

_logger = logging.getLogger(__name__)


def listen(
  given: str, *, allow_any_address: bool, has_keys: bool
) -> socket.socket:
  """Returns a socket that listens on an address of this host.

  Args:
    given: ADDRESS:PORT, or [ADDRESS]:PORT with IPv6.
    allow_any_address: whether 0.0.0.0 and [::], which are all addresses of this
      host, are allowed.
    has_keys: whether requests need an API key.

  Raises:
    UserError: if this host cannot listen on `given`, or if `given` is 0.0.0.0
      or [::] and not allowed.
  """
  host, port = split_address("--listen", given)
  family, place = _resolve(host, port)
  ip = _parse_ip(place[0])
  if ip.is_unspecified and not allow_any_address:
    raise UserError(
      f'--listen = "{given}" answers every host that reaches this one; give '
      "one address, or add --allow_any_address."
    )
  try:
    listening = socket.create_server(place, family=family, backlog=128)
  except OSError as error:
    shown = f"[{place[0]}]" if ip.version == 6 else place[0]
    raise explain_bind_error("--listen", shown, port, error) from None
  if not ip.is_loopback:
    lacks = "no encryption" if has_keys else "no API key and no encryption"
    _logger.warning(
      f"everyone who can reach {place[0]} can ask for completions, because "
      f"there is {lacks}; put a proxy in front that has them"
    )
  return listening


def make_url(listening: socket.socket) -> str:
  """Returns the URL of a listening socket."""
  ip, port = listening.getsockname()[:2]
  return f"http://[{ip}]:{port}" if ":" in ip else f"http://{ip}:{port}"


def is_on_loopback(listening: socket.socket) -> bool:
  """Returns whether only this host can reach a listening socket."""
  return _parse_ip(listening.getsockname()[0]).is_loopback


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple]:
  name = host.removeprefix("[").removesuffix("]")
  try:
    found = socket.getaddrinfo(name or "?", port, type=socket.SOCK_STREAM)
  except (OSError, UnicodeError):
    raise UserError(
      f'--listen: the name "{host}" has no address on this host; correct it, '
      "add it to /etc/hosts, or give the address itself."
    ) from None
  # If a name such as localhost has an IPv4 and an IPv6 address, take IPv4.
  family, *_, place = min(found, key=lambda x: x[0] != socket.AF_INET)
  ip = _parse_ip(place[0])
  if family == socket.AF_INET6 and ip.version == 4:  # as in ::ffff:127.0.0.1
    return socket.AF_INET, (str(ip), port)
  return family, place


def _parse_ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
  ip = ipaddress.ip_address(text)
  return getattr(ip, "ipv4_mapped", None) or ip
