# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sends requests to the manager, which allocates the devices of servers."""

import contextlib
import dataclasses
import json
import logging
import secrets
import ssl
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import grpc

from palm_mtf import __version__
from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.runtime.addresses import resolve, split_address
from palm_mtf.runtime.manager.slices import Places, Wish

_logger = logging.getLogger(__name__)

SERVICE, TURNS = "palm_mtf.Manager", "turns"
# A manager refuses requests of another protocol. Raise the number whenever a
# method of `Manager` or a dataclass of slices.py changes.
PROTOCOL = 4
# Both sides ping this often, and wait this long for the answer, because a
# stopped process or a cut network does not close a connection.
_PING_MS, _PONG_MS = 5000, 5000
# Ignore http_proxy, because a proxy may not reach the manager.
CHANNEL_OPTIONS = (
  ("grpc.enable_http_proxy", 0),
  ("grpc.max_reconnect_backoff_ms", 1000),
  ("grpc.max_receive_message_length", 2**26),
  ("grpc.keepalive_time_ms", _PING_MS),
  ("grpc.keepalive_timeout_ms", _PONG_MS),
  ("grpc.http2.ping_timeout_ms", _PONG_MS),
  ("grpc.http2.max_pings_without_data", 0),
)
_SECS = 10.0  # timeout of a request
# Every certificate has this name in place of an address: the certificate itself
# proves who the manager is.
TLS_NAME = (("grpc.ssl_target_name_override", "pods"),)


# Opens a stream on which the manager says when each program may start
# (turns.py): takes the client's messages, yields the manager's.
Stream = Callable[[Iterable[bytes]], Iterator[bytes]]


class NoManagerError(UserError):
  """Nothing answers at the address of the manager."""


class ManagerClient:
  """Sends requests to a manager; a context manager, which closes the client."""

  def __init__(self, setting: str, address: str, tls: str = ""):
    """Opens a channel; raises UserError if address or key cannot be used.

    Args:
      setting: name of the flag or macro that has `address`, for errors.
      address: "host:port" of the manager.
      tls: PREFIX of the manager's key and certificate (`read_tls`), or "".
    """
    host, _ = split_address(setting, address)
    resolve(setting, host)
    self._name = f'{setting} = "{address}"'
    if tls:
      key, certificate = read_tls(tls)
      both = grpc.ssl_channel_credentials(certificate, key, certificate)
      options = CHANNEL_OPTIONS + TLS_NAME
      self._channel = grpc.secure_channel(address, both, options)
    else:
      self._channel = grpc.insecure_channel(address, CHANNEL_OPTIONS)
    self._ended = threading.Event()
    self._threads: list[threading.Thread] = []
    self._places: dict[str, Places] = {}  # allocated devices, by owner

  def __enter__(self) -> "ManagerClient":
    return self

  def __exit__(self, *unused: object) -> None:
    self.close()

  def close(self) -> None:
    """Stops all heartbeats, and releases all slices that were allocated."""
    self._ended.set()
    for thread in self._threads:
      thread.join()
    while self._places:
      owner, _ = self._places.popitem()
      # If no manager answers now, it later releases slices of silent owners.
      with contextlib.suppress(UserError):
        self.call("release", owner=owner)
    self._channel.close()

  def allocate(
    self,
    owner: str,
    wish: Wish,
    avoid: Collection[str] = (),
    is_trial: bool = False,
  ) -> Places:
    """Asks the manager for slices; returns their devices.

    If `is_trial`, the manager allocates nothing. Otherwise the owner has its
    slices until this client is closed or silent for 30 seconds. Raises
    UserError if no island (servers with a fast network) can hold a slice, or no
    manager answers.
    """
    arguments = {"wish": dataclasses.asdict(wish), "avoid": sorted(avoid)}
    try:
      found = self.call("allocate", owner=owner, is_trial=is_trial, **arguments)
    except NoManagerError:
      if owner not in self._places:
        raise
      # The manager may be restarting. It keeps slices on disk, so the owner
      # still has the same devices.
      return self._places[owner]
    places = [[(x, i) for x, i in each] for each in found]
    if not is_trial:
      if owner not in self._places:
        self.send_beats(owner, lambda: _warn_of_release(owner))
      self._places[owner] = places
    return places

  def send_beats(self, name: str, take_unknown: Callable[[], None]) -> None:
    """Starts a thread that sends heartbeats of a server or an owner of slices.

    `name` is the server's address or the owner's name. If the manager does not
    know the name any more, calls `take_unknown`, for example to register again,
    and logs the UserError that `take_unknown` may raise.
    """

    def run() -> None:
      pause_secs, problem = 1.0, ""
      while not self._ended.wait(pause_secs):
        before, problem = problem, ""
        try:
          answer = self.call("beat", name=name)
          pause_secs = answer["pause_secs"]
          if not answer["is_known"]:
            take_unknown()
        except UserError as error:
          problem = str(error)
        if problem not in ("", before):
          _logger.warning(problem)

    self._threads.append(threading.Thread(target=run, daemon=True))
    self._threads[-1].start()

  def open_turns(self, owner: str, weight: float) -> Stream:
    """Returns a function that opens a stream of turns (manager/turns.py).

    The manager's messages end with a NoManagerError if the manager ends. With
    `--policy shares`, owners get device time in proportion to `weight`; with
    `--policy priority`, programs of a larger `weight` start first.
    """
    call = self._channel.stream_stream(f"/{SERVICE}/{TURNS}")
    metadata = [
      *_versions(),
      ("owner", owner),
      ("weight", str(weight)),
      ("client", secrets.token_hex(8)),
    ]

    def stream(requests: Iterable[bytes]) -> Iterator[bytes]:
      try:
        yield from call(iter(requests), metadata=metadata)
      except grpc.RpcError as error:
        raise self._explain(error) from None

    return stream

  def call(self, method: str, **arguments: Any) -> Any:
    """Calls a method of `Manager`; raises UserError if it is refused."""
    call = self._channel.unary_unary(f"/{SERVICE}/{method}")
    request = json_text(arguments).encode()
    try:
      return json.loads(call(request, _SECS, _versions()))
    except grpc.RpcError as error:
      raise self._explain(error) from None

  def _explain(self, error: grpc.RpcError) -> UserError:
    code = grpc.StatusCode
    match error.code():
      case code.INVALID_ARGUMENT | code.RESOURCE_EXHAUSTED:
        return UserError(error.details())
      case code.FAILED_PRECONDITION:
        return UserError(f"{self._name}: {error.details()}.")
      case code.UNAVAILABLE | code.DEADLINE_EXCEEDED:
        return NoManagerError(
          f"{self._name}: no manager answers there; start `palm_mtf pods "
          "manage`, or give the address that it prints, and its key if it has "
          "one."
        )
    return UserError(
      f"{self._name}: is no manager of palm_mtf; give the address that "
      "`palm_mtf pods manage` prints."
    )


def _versions() -> list[tuple[str, str]]:
  return [("protocol", str(PROTOCOL)), ("palm_mtf", __version__)]


def _warn_of_release(owner: str) -> None:
  raise UserError(
    f"the manager has released the slices of this process ({owner}); other "
    "clients may use their devices"
  )


def read_tls(prefix: str) -> tuple[bytes, bytes]:
  """Reads PREFIX.key and its self-signed certificate, PREFIX.pem.

  The manager and its clients have the same two files, and refuse peers that do
  not have them. Raises UserError if the files are no key and certificate.
  """
  key, certificate = f"{prefix}.key", f"{prefix}.pem"
  try:
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    with open(key, "rb") as first, open(certificate, "rb") as second:
      return first.read(), second.read()
  except OSError as error:  # also ssl.SSLError
    raise UserError(
      f"{key} and {certificate} are no key with its certificate "
      f"({error.strerror or error}); docs/pods.md shows how to make them."
    ) from None
