# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A learner's connection to the client of its run."""

import ssl
import time
from collections.abc import Iterator
from typing import Any

import grpc

from palm_mtf.errors import UserError
from palm_mtf.learners.protocol import (
  Check,
  Message,
  MessageReader,
  at_most,
  write_chunks,
)
from palm_mtf.learners.service import LINK_OPTIONS, SERVICE, TOKEN
from palm_mtf.runtime.addresses import resolve, split_address
from palm_mtf.runtime.manager.client import TLS_NAME

_PAUSE_SECS = 1.0  # before a call is made again
_CALL_SECS = 3600.0  # enough for a large model over a slow link


class NoRunError(UserError):
  """Nothing answers at the address of the run."""


class LearnerClient:
  """Calls the methods of a run; a context manager, which disconnects."""

  def __init__(
    self, address: str, certificate: str, token: str, wait_secs: float = 60.0
  ):
    """Opens a channel; raises UserError if address or certificate are wrong.

    Args:
      address: "host:port" of the run.
      certificate: path of the run's certificate, PREFIX.pem.
      token: what `add_member` returned.
      wait_secs: how long a call is repeated while the run does not answer.
    """
    host, _ = split_address("HOST:PORT", address)
    resolve("HOST:PORT", host)
    try:
      ssl.create_default_context(cafile=certificate)
      with open(certificate, "rb") as file:
        trusted = file.read()
    except OSError as error:  # also ssl.SSLError
      raise UserError(
        f"--certificate = {certificate!r}: is not a certificate "
        f"({error.strerror or error}); ask who runs {address} for PREFIX.pem."
      ) from None
    self._address, self._wait_secs = address, wait_secs
    self._metadata = [(TOKEN, token)]
    self._channel = grpc.secure_channel(
      address,
      grpc.ssl_channel_credentials(trusted),
      (*LINK_OPTIONS, *TLS_NAME),
    )

  def __enter__(self) -> "LearnerClient":
    return self

  def __exit__(self, *unused: object) -> None:
    self._channel.close()

  def join(self, header: dict[str, Any]) -> dict[str, Any]:
    """Joins the run; returns the header with its program."""
    return self.call("join", Message(header)).header

  def next(self, header: dict[str, Any], check: Check) -> Message:
    """Returns work, whose header and arrays `check` accepts."""
    return self.call("next", Message(header), check)

  def contribute(self, message: Message) -> dict[str, Any]:
    """Sends a result; returns {"accepted": bool, "reason": str}."""
    return self.call("contribute", message).header

  def call(
    self, method: str, message: Message, check: Check | None = None
  ) -> Message:
    """Calls a method of `DecoupledHandler`; `check` may refuse the answer.

    Without `check`, an answer with arrays is refused.

    Raises UserError if the run refuses the call, NoRunError if none answers.
    """
    deadline = time.monotonic() + self._wait_secs
    while True:
      try:
        return self._call_once(method, message, check or at_most(0))
      except grpc.RpcError as error:
        code = grpc.StatusCode
        is_busy = error.code() in (code.UNAVAILABLE, code.RESOURCE_EXHAUSTED)
        if not is_busy or time.monotonic() > deadline:
          raise self._explain(error) from None
      time.sleep(_PAUSE_SECS)

  def _call_once(self, method: str, message: Message, check: Check) -> Message:
    call = self._channel.stream_stream(f"/{SERVICE}/{method}")
    requests: Iterator[bytes] = write_chunks(message)
    reader = None
    for chunk in call(requests, timeout=_CALL_SECS, metadata=self._metadata):
      if reader:
        reader.take(chunk)
      else:
        reader = MessageReader(chunk, check)
    if not reader:
      raise UserError(f"{self._address}: has sent nothing.")
    return reader.end()

  def _explain(self, error: grpc.RpcError) -> UserError:
    code = grpc.StatusCode
    match error.code():
      case code.UNAVAILABLE:
        return NoRunError(
          f"{self._address}: no run answers there, or its certificate is not "
          "--certificate; ask who runs it for address and PREFIX.pem."
        )
      case code.UNAUTHENTICATED:
        return UserError(
          f"{self._address}: {error.details()}; ask who runs it for a token."
        )
    return UserError(f"{self._address}: {error.details()}")
