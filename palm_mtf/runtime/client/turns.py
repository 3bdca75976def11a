# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""How a client takes turns: it asks a scheduler before each program.

runtime/manager/turns.py has the messages. While no manager answers, programs
run without turns: the devices stay the client's, but nobody keeps shares and
budgets.
"""

import contextlib
import itertools
import json
import logging
import queue
import statistics
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager

from palm_mtf.errors import UserError
from palm_mtf.runtime.manager.client import Stream
from palm_mtf.runtime.manager.turns import Message, Turns, join_messages
from palm_mtf.runtime.program import Program
from palm_mtf.runtime.scheduler import GangScheduler

_logger = logging.getLogger(__name__)

_FIRST_SECS = 0.01  # estimate for a program that has not run yet
# A client is charged the median time of so many last runs of a program, so that
# one slow run does not keep the client from its share.
_NUM_RUNS = 9
_MAX_IN_FLIGHT = 16  # programs on a device, without a manager
_RETRY_SECS = 1.0  # between attempts to reach a manager
# A program fails if nobody frees a buffer for so long while it waits only for
# the bytes that buffers keep.
_FULL_SECS = 60.0


class _Turn:
  """A turn that a program waits for."""

  def __init__(self) -> None:
    self.begun = threading.Event()
    self.refusal = ""


class TurnTaker:
  """Takes a turn for each program of a client."""

  def __init__(self, devices: Mapping[str, str]):
    """Takes {TensorFlow's name of a device: the scheduler's name of it}."""
    self._devices, self._numbers = devices, itertools.count()
    self._lock = threading.Lock()
    self._turns: dict[int, _Turn] = {}  # that programs wait for
    # Seconds of the last runs, without the first run, which prepares a program
    # in the servers while its devices run other programs.
    self._secs: weakref.WeakKeyDictionary[Program, deque[float]] = (
      weakref.WeakKeyDictionary()
    )

  def take(
    self, program: Program, after: Iterable[Future] = ()
  ) -> AbstractContextManager[None]:
    """Asks for a program's turn; returns a context manager for its call.

    The context manager waits for the turn, and then for `after`: programs that
    asked before, so that they need not wait for this one. It raises the error
    of one that fails, and UserError if the program needs more bytes than its
    devices may hold, or waits too long for buffers to be freed.
    """
    number, turn = next(self._numbers), _Turn()
    num_bytes = self._name(
      program.device_bytes or dict.fromkeys(self._devices, 0)
    )
    with self._lock:
      self._turns[number] = turn
    secs = self._estimate(program)
    self._send({"submit": number, "num_bytes": num_bytes, "secs": secs})

    @contextlib.contextmanager
    def wait() -> Iterator[None]:
      while not turn.begun.wait(_FULL_SECS):
        self._send({"check": number})
      with self._lock:
        del self._turns[number]
      if turn.refusal:
        raise UserError(turn.refusal)
      start, kept = time.monotonic(), {}
      try:
        for each in after:
          each.result()
        start = time.monotonic()
        yield
        kept = num_bytes
      finally:
        if program in self._secs:
          self._secs[program].append(time.monotonic() - start)
        else:
          self._secs[program] = deque(maxlen=_NUM_RUNS)
        secs = self._estimate(program)
        self._send({"finish": number, "secs": secs, "kept": kept})

    return wait()

  def _estimate(self, program: Program) -> float:
    runs = self._secs.get(program)
    return statistics.median_low(runs) if runs else _FIRST_SECS

  def free(self, num_bytes: Mapping[str, int]) -> None:
    """Gives back bytes, by device, of buffers that programs made."""
    self._send({"free": self._name(num_bytes)})

  def _name(self, num_bytes: Mapping[str, int]) -> dict[str, int]:
    return {self._devices[name]: n for name, n in num_bytes.items()}

  def _send(self, message: Message) -> None:
    """Sends a message to the scheduler."""
    raise NotImplementedError

  def _take_answer(self, answer: Message) -> None:
    with self._lock:
      turn = self._turns.get(answer.get("start", answer.get("refuse")))
    if turn:
      turn.refusal = answer.get("why", "")
      turn.begun.set()


class OwnTurns(TurnTaker):
  """Turns on devices that no manager shares out."""

  def __init__(self, budgets: Mapping[str, int]):
    """Takes {TensorFlow's name of a device: bytes that buffers may have}."""
    super().__init__({x: x for x in budgets})
    scheduler = GangScheduler("fifo", budgets, _MAX_IN_FLIGHT)
    self._client = Turns(scheduler, dict).add_client(
      "client", 1.0, self._take_answer
    )

  def _send(self, message: Message) -> None:
    self._client([message])


class ManagedTurns(TurnTaker):
  """Turns that a manager gives."""

  def __init__(self, stream: Stream, devices: Mapping[str, str]):
    """Opens gRPC's stream to the manager, whose names of devices are given."""
    super().__init__(devices)
    self._stream = stream
    self._requests: queue.SimpleQueue[Message | None] | None = None
    self._kept: Counter[str] = Counter()  # bytes of buffers, by device
    self._ended = threading.Event()
    self._open()
    threading.Thread(target=self._read, daemon=True).start()

  def close(self) -> None:
    """Ends the stream; the manager then ends the client's programs."""
    self._ended.set()
    self._end_turns()

  def _send(self, message: Message) -> None:
    """Sends a message; if no manager answers, ends all waiting."""
    with self._lock:
      self._kept.update(message.get("kept", {}))
      self._kept.subtract(message.get("free", {}))
      if self._requests:
        self._requests.put(message)
        return
    self._begin_turns()

  def _open(self) -> None:
    with self._lock:
      self._requests = queue.SimpleQueue()
      # A manager that was restarted does not know the client's buffers.
      self._requests.put({"keep": dict(self._kept)})
      self._answers = self._stream(join_messages(self._requests))

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
    is_told = False  # that no manager answers
    while True:
      try:
        for answers in self._answers:
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
      self._open()
