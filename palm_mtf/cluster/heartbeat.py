# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Notices a pod's server that is gone, stopped, cut off or started anew.

A thread for each server asks it, again and again, whether it is still the one
that it was (server_info.py). One that gives no answer for POD_TIMEOUT_SECS is
lost: the connections to it are cut, so that whatever waits for it fails, as it
does at once where the server has ended. A second question follows the first
without an answer: where this process itself was stopped for a while, its first
one was too late.
"""

import concurrent.futures
import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from palm_mtf._tf import tf
from palm_mtf.cluster.device_table import Place
from palm_mtf.cluster.local_servers import PodServers
from palm_mtf.cluster.server_info import (
  NoAnswerError,
  NotOursError,
  ServerFacts,
  ask,
  ask_incarnation,
  difference,
)
from palm_mtf.cluster.sockets import cut
from palm_mtf.errors import UserError

_Answer = TypeVar("_Answer")
# Of POD_TIMEOUT_SECS: a pause, and two questions.
_PAUSE, _QUESTION = 0.25, 0.375
_CUT_AGAIN_SECS = 1.0
# How often a session that is being connected is looked after.
_CONNECT_SECS = 0.5
# A server that has just started answers before it knows what it is.
_AGAIN_SECS = 0.2
# How TensorFlow says that a task is not there, and which.
# What waits elsewhere for a server that is not there is cancelled.
_NOT_THERE = (
  tf.errors.UnavailableError,
  tf.errors.AbortedError,
  tf.errors.CancelledError,
)
_TASK = re.compile(r"/job:pod_(\d+)/replica:\d+/task:(\d+)")


class PodLostError(UserError):
  """A pod can do no more; names it, its host, and in which phase that was.

  Attributes:
    pod: its number.
    is_missing: it was not there when the watch began.
  """

  def __init__(self, pod: int, message: str, is_missing: bool = False):
    """Keeps all."""
    super().__init__(message)
    self.pod, self.is_missing = pod, is_missing


class Heartbeat:
  """Watches the servers of a run; a context manager."""

  def __init__(
    self,
    servers: PodServers,
    places: Sequence[Sequence[Place]],
    secs: float,
  ):
    """Asks each server for the first time.

    Args:
      servers: those of this machine, if there are any.
      places: each pod's devices in servers; none where pods are in process.
      secs: POD_TIMEOUT_SECS.

    Raises:
      PodLostError: one does not answer.
      UserError: one cannot do what it has to.
    """
    self._servers, self._secs = servers, secs
    # The pod of each server, by address.
    self._pods = {
      place.address: pod
      for pod, devices in enumerate(places)
      for place in devices
    }
    self._lost: dict[str, str] = {}
    self._end = threading.Event()
    self._threads: dict[str, threading.Thread] = {}
    self._incarnations: dict[str, int] = {}
    first = None
    with concurrent.futures.ThreadPoolExecutor() as threads:
      asked = {x: threads.submit(self._first_answer, x) for x in self._pods}
    for address, answer in asked.items():
      try:
        self._incarnations[address], facts = answer.result()
      except NoAnswerError as error:
        raise PodLostError(
          self._pods[address],
          self._message(address, str(error), "at the start"),
          is_missing=True,
        ) from None
      first = first or facts
      how = difference(facts, first)
      most = max(x.device for y in places for x in y if x.address == address)
      if most >= facts.num_devices:
        how = how or (
          f"serves {facts.num_devices} devices and is to give that of number "
          f"{most}, counted from 0 (--devices)"
        )
      if how:
        raise UserError(self._message(address, how, "at the start") + ".")

  def __enter__(self) -> "Heartbeat":
    for address in self._pods:
      thread = threading.Thread(target=self._watch, args=[address], daemon=True)
      thread.start()
      self._threads[address] = thread
    return self

  def __exit__(self, *unused: object) -> None:
    self._end.set()
    # A thread that came back from TensorFlow while Python ends would abort it.
    end = time.monotonic() + self._secs
    for address, thread in self._threads.items():
      thread.join(_CUT_AGAIN_SECS)
      while thread.is_alive() and time.monotonic() < end:
        _cut(address)  # there is no answer: let its question end
        thread.join(_CUT_AGAIN_SECS)

  def connect(self, session: tf.Session) -> None:
    """Connects a session with all servers; by itself it would try for ever.

    Raises:
      OpError: it cannot; a server is lost, as in what `during` encloses.
    """
    nothing = tf.no_op()
    errors: list[tf.errors.OpError] = []

    def run() -> None:
      try:
        session.run(nothing)
      except tf.errors.OpError as error:
        errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
      thread.join(_CONNECT_SECS)
      if self._lost:
        raise tf.errors.UnavailableError(None, None, "a server is lost")
    if errors:  # another call would try for ever
      raise errors[0]

  @contextlib.contextmanager
  def during(self, phase: str) -> Iterator[None]:
    """Raises PodLostError where its body fails because a pod is lost.

    Args:
      phase: what the body does, as in "in step 8".
    """
    try:
      yield
    except tf.errors.OpError as error:
      lost = self._find_lost() or self._find_broken_off(error)
      if not lost:
        raise
      address, how = lost
      message = self._message(address, how, phase)
      raise PodLostError(self._pods[address], message) from None

  def _find_lost(self) -> tuple[str, str] | None:
    """Returns the address of a server that is lost, and how."""
    if ended := self._servers.find_ended():
      pod, how = ended
      return next(x for x, of in self._pods.items() if of == pod), how
    with concurrent.futures.ThreadPoolExecutor() as threads:
      list(threads.map(self._look, self._pods.keys() - self._lost.keys()))
    return next(iter(self._lost.items()), None)

  def _find_broken_off(
    self, error: tf.errors.OpError
  ) -> tuple[str, str] | None:
    """Returns a server that answers, and yet the error says it was not there.

    Its connection to another pod has ended, or another client has taken it.
    """
    named = _TASK.findall(error.message)
    if not named or not isinstance(error, _NOT_THERE):
      return None
    pod, task = map(int, named[-1])  # the far end stands last
    address = [x for x, of in self._pods.items() if of == pod][task]
    return address, (
      "answers, but has broken off (another client has taken it, or its "
      "connection to another pod has ended)"
    )

  def _message(self, address: str, how: str, phase: str) -> str:
    pod = self._pods[address]
    name = self._servers.name(pod, address)
    return f"pod {pod}: its server {name} {how}, {phase}"

  def _watch(self, address: str) -> None:
    while not self._end.wait(self._secs * _PAUSE):
      self._look(address)
      while address in self._lost:
        _cut(address)
        # It may be connected once more: to a stopped one, by the kernel.
        if self._end.wait(_CUT_AGAIN_SECS):
          return

  def _look(self, address: str) -> None:
    """Notes whether a server is lost."""
    try:
      incarnation = self._ask(ask_incarnation, address)
      if incarnation != self._incarnations[address]:
        self._lost[address] = "has been started anew"
    except NoAnswerError as error:
      self._lost[address] = str(error)

  def _first_answer(self, address: str) -> tuple[int, ServerFacts]:
    # In this order: if it starts anew in between, it will be found out.
    return self._ask(ask_incarnation, address), self._ask(ask, address)

  def _ask(
    self, question: Callable[[str, float], _Answer], address: str
  ) -> _Answer:
    """Asks until there is an answer, twice at least."""
    start = time.monotonic()
    secs = self._secs * _QUESTION
    while True:
      try:
        return question(address, secs)
      except NoAnswerError as error:
        if time.monotonic() - start >= 2 * secs or self._end.is_set():
          if isinstance(error, NotOursError):
            raise
          raise NoAnswerError(
            f"has not answered for {self._secs:g} seconds"
          ) from error
      time.sleep(_AGAIN_SECS)


def _cut(address: str) -> None:
  host, _, port = address.rpartition(":")
  cut(host, int(port))
