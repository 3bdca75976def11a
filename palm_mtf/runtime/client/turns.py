# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""How a client takes turns: it asks the manager before each program.

runtime/manager/turns.py has the messages. While no manager answers, programs
run without turns: the devices stay the client's, only shares are not kept.
"""

import contextlib
import itertools
import json
import logging
import queue
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.runtime.manager.client import Stream
from palm_mtf.runtime.program import Program

_logger = logging.getLogger(__name__)

_FIRST_SECS = 0.01  # estimate for a program that has not run yet
_RETRY_SECS = 1.0  # between attempts to reach a manager


class _Turn:
  """A turn that a program waits for."""

  def __init__(self) -> None:
    self.begun = threading.Event()
    self.refusal = ""


class TurnTaker:
  """Takes a turn for each program of a client."""

  def __init__(self, stream: Stream, devices: Mapping[str, str]):
    """Opens the stream to the manager.

    Args:
      stream: gRPC's call of the manager's stream.
      devices: {TensorFlow's name of a device: the manager's name of it}.
    """
    self._stream, self._devices = stream, devices
    self._numbers = itertools.count()
    self._lock = threading.Lock()
    self._requests: queue.SimpleQueue[bytes | None] | None = None
    self._turns: dict[int, _Turn] = {}  # that programs wait for
    self._secs: weakref.WeakKeyDictionary[Program, float] = (
      weakref.WeakKeyDictionary()
    )
    self._ended = threading.Event()
    self._open()
    threading.Thread(target=self._read, daemon=True).start()

  def close(self) -> None:
    """Ends the stream; the manager then ends the client's programs."""
    self._ended.set()
    self._end_turns()

  @contextlib.contextmanager
  def take(self, program: Program) -> Iterator[None]:
    """Waits for the program's turn; the body runs the program.

    Raises:
      UserError: the program needs more bytes than its devices may hold.
    """
    number, turn = next(self._numbers), _Turn()
    needed = program.device_bytes or dict.fromkeys(self._devices, 0)
    num_bytes = {self._devices[name]: n for name, n in needed.items()}
    secs = self._secs.get(program, _FIRST_SECS)
    with self._lock:
      self._turns[number] = turn
    self._send({"submit": number, "num_bytes": num_bytes, "secs": secs})
    turn.begun.wait()
    with self._lock:
      del self._turns[number]
    if turn.refusal:
      raise UserError(turn.refusal)
    start = time.monotonic()
    try:
      yield
    finally:
      secs = self._secs[program] = time.monotonic() - start
      self._send({"finish": number, "secs": secs, "kept": {}})

  def _send(self, message: Mapping[str, Any]) -> None:
    """Sends a message; if no manager answers, ends all waiting."""
    with self._lock:
      if self._requests:
        self._requests.put(json_text(message).encode())
        return
    self._begin_turns()

  def _open(self) -> None:
    with self._lock:
      self._requests = queue.SimpleQueue()
      # gRPC asks for the next request until it gets None.
      self._answers = self._stream(iter(self._requests.get, None))

  def _end_turns(self) -> None:
    """Ends the stream, and lets all programs that wait run."""
    with self._lock:
      if self._requests:
        self._requests.put(None)
      self._requests = None
    self._begin_turns()

  def _begin_turns(self) -> None:
    with self._lock:
      for turn in self._turns.values():
        turn.begun.set()

  def _read(self) -> None:
    """Reads the manager's answers, until the taker is closed."""
    while True:
      try:
        for answer in self._answers:
          self._take_answer(json.loads(answer))
      except UserError as error:
        if not self._ended.is_set():
          _logger.warning(f"programs run without turns: {error}")
      self._end_turns()
      if self._ended.wait(_RETRY_SECS):
        return
      self._open()

  def _take_answer(self, answer: Mapping[str, Any]) -> None:
    with self._lock:
      turn = self._turns.get(answer.get("start", answer.get("refuse")))
    if turn:
      turn.refusal = answer.get("why", "")
      turn.begun.set()
