# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Who may send requests: the address to listen on, Host headers, API keys."""

import functools
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import socket
import stat
from collections.abc import Collection, Sequence

from aiohttp import web

from palm_mtf.errors import UserError, shorten
from palm_mtf.generation.serving.messages import RefusalError
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

  Raises UserError if this host cannot listen on `given`, or if `given` is
  0.0.0.0 or [::] and not allowed.
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
  # A name such as localhost may have IPv4 and IPv6 addresses in any order. Take
  # IPv4 first, so that one name always gives the same URL.
  family, *_, place = min(found, key=lambda x: x[0] != socket.AF_INET)
  ip = _parse_ip(place[0])
  if family == socket.AF_INET6 and ip.version == 4:  # IPv4 as ::ffff:a.b.c.d
    return socket.AF_INET, (str(ip), port)
  return family, place


def _parse_ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
  ip = ipaddress.ip_address(text)
  return getattr(ip, "ipv4_mapped", None) or ip


_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_MOST_KEY_FILE_BYTES = 2**20


class Access:
  """Decides whether a request is answered, and which client sent it."""

  def __init__(
    self, hosts: Collection[str] | None = None, keys: Sequence[str] = ()
  ):
    """Takes the conditions that requests must meet.

    `hosts` are names that the Host header may have; None allows every name.
    `keys` are accepted API keys; () if requests need no key.
    """
    self._hosts = None if hosts is None else {normalize_host(x) for x in hosts}
    self._keys = [_hash_key(key) for key in keys]

  def check_host(self, request: web.Request) -> None:
    """Raises RefusalError unless a request names this server.

    This prevents DNS rebinding: if a site resolves its own name to a loopback
    address, the site's pages can send requests to a server on loopback, but the
    browser then sends the site's name as Host.
    """
    hosts = request.headers.getall("Host", [])
    if len(hosts) != 1:
      raise RefusalError(400, "give the header Host once.")
    if self._hosts is None or normalize_host(hosts[0]) in self._hosts:
      return
    raise RefusalError(
      403,
      f"Host: {shorten(hosts[0])} is not a name of this server; add it "
      "with --allowed_host.",
    )

  def find_client(self, request: web.Request) -> str:
    """Returns a name for a request's sender, from its API key or its network.

    The batcher shares slots among senders, and limits each one's completions.
    Raises RefusalError if this server has keys and the request has none.
    """
    if not self._keys:
      return _find_network(request.remote or "")
    given = request.headers.getall("Authorization", [])
    scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("",) * 3
    digest = _hash_key(key.strip())
    # Compare with every key, each in constant time, so that the response time
    # reveals nothing about the keys.
    found = [hmac.compare_digest(digest, each) for each in self._keys]
    if scheme.lower() != "bearer" or not any(found):
      raise RefusalError(
        401,
        "give the header Authorization: Bearer KEY, with a key of this server.",
        {"WWW-Authenticate": "Bearer"},
      )
    return f"key {found.index(True)}"


@functools.lru_cache(256)
def normalize_host(host: str) -> str:
  """Returns a Host header's name or address, in canonical form without port.

  `host` is "NAME", "NAME:PORT", "[IPV6]", "[IPV6]:PORT" or "IPV6".
  """
  match = re.fullmatch(r"\[(.+)\](?::\d*)?|([^:]+):\d*", host)
  name = (match[1] or match[2]) if match else host
  try:
    return str(ipaddress.ip_address(name))
  except ValueError:
    return name.lower()


def find_allowed_hosts(
  listen: str, *, is_loopback: bool, allowed: Sequence[str]
) -> set[str] | None:
  """Returns the names that a Host header may have; None allows every name.

  Raises UserError if one of `allowed`, from --allowed_host, is not a name.
  """
  for name in allowed:
    if not re.fullmatch(r"\[?[\w.:-]+\]?", name) or (
      normalize_host(name) != normalize_host(f"[{name.strip('[]')}]")
    ):
      raise UserError(
        f"--allowed_host = {shorten(name)}: give the name of a host or an "
        "address, without a port."
      )
  # Off loopback, a server cannot know all of its names, so allow every name.
  if not is_loopback and not allowed:
    return None
  return {*_LOOPBACK_NAMES, listen, *allowed}


def read_keys(path: str) -> list[str]:
  """Returns the API keys of a file, one per line.

  Raises UserError if the file cannot be read, other users can read or write it,
  a line is not a key, or there is no key.
  """
  what = f"--api_key_file = {path!r}"
  try:
    with open(os.path.expanduser(path), "rb") as file:
      mode = os.fstat(file.fileno()).st_mode
      content = file.read(_MOST_KEY_FILE_BYTES)
  except OSError as error:
    raise UserError(f"{what}: {error.strerror}; give a text file.") from None
  if stat.S_IMODE(mode) & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
    raise UserError(
      f"{what}: other users can read or write it; run chmod 600 {path}"
    )
  lines = content.decode("utf-8-sig", "replace").splitlines()
  keys = [line.strip() for line in lines if line.strip()]
  for number, line in enumerate(lines, 1):
    # The message does not show the key, because messages are logged.
    if not re.fullmatch(r"[!-~]*", line.strip()):
      raise UserError(
        f"{what}: line {number} is not a key; write printable ASCII characters "
        "without spaces."
      )
  if not keys:
    raise UserError(f"{what}: holds no key; write one key per line.")
  return keys


def _hash_key(key: str) -> bytes:
  return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _find_network(address: str) -> str:
  # Returns an IPv4 address, or the /64 network of an IPv6 address, because one
  # host can use all 2**64 addresses of its network.
  if ":" not in address:
    return address
  ip = address.partition("%")[0]
  return str(ipaddress.ip_network(f"{ip}/64", strict=False))
