# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens that reach other threads before the decoder call returns them."""

import contextlib
import socket
import struct
from collections.abc import Iterable

_RECORD = struct.Struct("=3i")  # as in native/token_feed.h


class TokenFeed:
  """A pair of sockets: steps in C++ hold one end, Python the other."""

  def __init__(self):
    self._ours, self._theirs = socket.socketpair()
    for each in (self._ours, self._theirs):
      each.setblocking(False)
    self.socket = self._theirs.fileno()  # for steps in C++
    self._rest = b""  # bytes of a record that is not complete yet

  def fileno(self) -> int:
    """Returns a descriptor that can be read while tokens wait."""
    return self._ours.fileno()

  def read(self) -> Iterable[tuple[int, int, int]]:
    """Returns the tokens that wait, as (slot, number, token).

    `number` is the token's number in the new text, from 0.
    """
    try:
      content = self._rest + self._ours.recv(2**16)
    except BlockingIOError:
      return ()
    whole = len(content) // _RECORD.size * _RECORD.size
    self._rest = content[whole:]
    return _RECORD.iter_unpack(content[:whole])

  def end_call(self) -> None:
    """Makes a call with this feed return after the current step."""
    # A full socket already has such a request.
    with contextlib.suppress(BlockingIOError):
      self._ours.send(b".")

  def drop_tokens(self) -> None:
    """Drops the tokens that wait, because the call has returned them too."""
    _empty(self._ours)
    self._rest = b""

  def begin_call(self) -> None:
    """Drops requests to end a call; later requests end the next call."""
    _empty(self._theirs)


def _empty(receiver: socket.socket) -> None:
  with contextlib.suppress(BlockingIOError):
    while receiver.recv(2**16):
      pass
