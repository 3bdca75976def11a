# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Turns: before a client runs a program, it asks a scheduler for the devices.

manager/turns.py defines the client's messages to the scheduler. While no
manager answers, programs run without turns: the client keeps its devices, but
time shares and memory budgets are not enforced.
"""

import contextlib
import itertools
import json
import logging
import queue
import threading
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager

from palm_mtf.errors import UserError
from palm_mtf.runtime.manager.client import Stream
from palm_mtf.runtime.manager.turns import Message, Turns, join_messages
from palm_mtf.runtime.program import Program
from palm_mtf.runtime.scheduler import GangScheduler

_logger = logging.getLogger(__name__)

# Limit of programs sent to a device at a time. It is lower (MAX_IN_FLIGHT) with
# several clients: another client's program waits for all sent before.
_MAX_IN_FLIGHT = 16
_RETRY_SECS = 1.0  # between attempts to reach a manager
_FIRST_SECS = 10.0  # until programs start although no manager has answered
_ONLY = "client"  # name of this client for the scheduler in its own process
# Seconds between checks. A program fails at a check if buffers hold bytes that
# it needs, and no client has freed bytes since the previous check.
_FULL_SECS = 60.0


class _Turn:
  """A program's wait until the scheduler lets it start, or refuses it."""

  def __init__(self) -> None:
    self.begun = threading.Event()
    self.refusal = ""  # why the scheduler refuses the program, if it does


class TurnTaker:
  """Asks a scheduler for a turn for each program of a client."""

  def __init__(self, devices: Mapping[str, str]):
    """Takes {TensorFlow's name of a device: the scheduler's name}."""
    self._devices, self._numbers = devices, itertools.count()
    self._lock = threading.Lock()
    self._turns: dict[int, _Turn] = {}  # turns not yet given
    # {the future `begun` of a program: number of the program's turn}, to tell
    # the scheduler which programs a later program reads.
    self._numbers_of: weakref.WeakKeyDictionary[Future, int] = (
      weakref.WeakKeyDictionary()
    )

  def take(
    self,
    program: Program,
    after: Collection[Future] = (),
    begun: Future | None = None,
  ) -> AbstractContextManager[None]:
    """Asks for a program's turn; returns a context manager for its call.

    The context manager waits for the turn, and then for `after`. It raises the
    error of a future that fails, and UserError if the program needs more bytes
    than its devices may hold, or waits too long for buffers to be freed.

    If a future of `after` is the `begun` of an earlier program, this program's
    turn comes after that program's turn. The caller completes `begun` when the
    program begins or fails.
    """
    number, turn = next(self._numbers), _Turn()
    num_bytes = self._name(
      program.device_bytes or dict.fromkeys(self._devices, 0)
    )
    with self._lock:
      self._turns[number] = turn
    # From earlier runs with this id, the scheduler estimates the run time.
    message = {"submit": number, "program": id(program), "num_bytes": num_bytes}
    numbers = [self._numbers_of.get(x) for x in after]
    self._send(message | {"after": [x for x in numbers if x is not None]})
    if begun:
      self._numbers_of[begun] = number

    @contextlib.contextmanager
    def wait() -> Iterator[None]:
      while not turn.begun.wait(_FULL_SECS):
        self._send({"check": number})
      with self._lock:
        del self._turns[number]
      if turn.refusal:
        raise UserError(turn.refusal)
      kept = {}
      try:
        for each in after:
          each.result()
        self._send({"run": number})
        yield
        kept = num_bytes
      finally:
        self._send({"finish": number, "kept": kept})

    return wait()

  def free(self, num_bytes: Mapping[str, int]) -> None:
    """Gives {device: bytes} of removed buffers back to the scheduler."""
    self._send({"free": self._name(num_bytes)})

  def _name(self, num_bytes: Mapping[str, int]) -> dict[str, int]:
    return {self._devices[name]: n for name, n in num_bytes.items()}

  def _send(self, message: Message) -> None:
    raise NotImplementedError

  def _take_answer(self, answer: Message) -> None:
    with self._lock:
      turn = self._turns.get(answer.get("start", answer.get("refuse")))
    if turn:
      turn.refusal = answer.get("why", "")
      turn.begun.set()


class OwnTurns(TurnTaker):
  """Turns without a manager, from a scheduler in this process."""

  def __init__(self, budgets: Mapping[str, int]):
    """Takes {TensorFlow's name of a device: bytes that buffers may use}."""
    super().__init__({x: x for x in budgets})
    scheduler = GangScheduler("fifo", budgets, _MAX_IN_FLIGHT)
    self._all = Turns(scheduler, dict)
    self._all.add_client(_ONLY, 1.0, self._take_answer)

  def _send(self, message: Message) -> None:
    if "run" not in message:  # one client: no need to measure its device time
      self._all.take(_ONLY, [message])


class ManagedTurns(TurnTaker):
  """Turns that a manager gives."""

  def __init__(
    self, stream: Stream, devices: Mapping[str, str], reserved: int = 0
  ):
    """Opens the manager's stream of turns by calling `stream`.

    `devices` is {TensorFlow's name of a device: the manager's name}. The client
    needs `reserved` bytes per device besides its buffers.
    """
    super().__init__(devices)
    self._stream = stream
    # Messages to the manager on the newest stream; None ends the stream.
    self._newest: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    # `_newest` while a manager answers; None otherwise, to drop new messages.
    self._requests: queue.SimpleQueue[Message | None] | None = None
    # {device: bytes of buffers and reserved bytes}; a new manager gets them.
    self._kept = Counter(dict.fromkeys(devices.values(), reserved))
    self._ended, self._answered = threading.Event(), threading.Event()
    threading.Thread(target=self._read, daemon=True).start()
    # Wait, because programs run without turns until the manager answers.
    self._answered.wait(_FIRST_SECS)

  def close(self) -> None:
    """Ends the stream; waiting programs run without turns."""
    self._ended.set()
    self._end_turns()

  def _send(self, message: Message) -> None:
    """Sends a message; if no manager answers, lets waiting programs run."""
    with self._lock:
      self._kept.update(message.get("kept", {}))
      self._kept.subtract(message.get("free", {}))
      if self._requests:
        self._requests.put(message)
        return
    self._begin_turns()

  def _end_turns(self) -> None:
    """Ends the stream, and lets all waiting programs run."""
    with self._lock:
      self._newest.put(None)
      self._requests = None
    self._begin_turns()

  def _begin_turns(self) -> None:
    with self._lock:
      for turn in self._turns.values():
        turn.begun.set()

  def _read(self) -> None:
    """Reads the manager's answers, until the taker is closed."""
    is_told = False  # whether it is logged that no manager answers
    while True:
      with self._lock:
        # `close` sets `_ended`, then ends the newest queue. If that queue was
        # an older one than this, return, because nothing would end this one.
        requests = self._newest = queue.SimpleQueue()
        if self._ended.is_set():
          return
      try:
        for answers in self._stream(join_messages(requests)):
          # A suspended manager accepts connections, but answers nothing. So let
          # programs take turns only now that the manager has answered.
          if not self._requests and not self._ended.is_set():
            with self._lock:
              # A manager that was restarted does not know the client's buffers.
              requests.put({"keep": {x: n for x, n in self._kept.items() if n}})
              self._requests = requests
            self._answered.set()
          is_told = False
          for answer in json.loads(answers):
            self._take_answer(answer)
      except UserError as error:
        if not (is_told or self._ended.is_set()):
          _logger.warning(f"programs run without turns: {error}")
        is_told = True
      self._end_turns()
      if self._ended.wait(_RETRY_SECS):
        return
