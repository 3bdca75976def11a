# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Notices a pod's server that is gone, stopped, cut off or started anew.

A thread for each server asks it, again and again, what it is (server_facts.py).
One that gives no answer for POD_TIMEOUT_SECS is lost: the connections to it are
cut, so that whatever waits for it fails, as it does at once where the server
has ended. A second question follows the first without an answer: where this
process itself was stopped for a while, its first one was too late.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

from palm_mtf._tf import tf
from palm_mtf.errors import UserError
from palm_mtf.pod_servers import PodServers
from palm_mtf.server_facts import NoAnswerError, ServerFacts, ask
from palm_mtf.sockets import cut

# Of POD_TIMEOUT_SECS: a pause, and two questions.
_PAUSE, _QUESTION = 0.25, 0.375
_CUT_AGAIN_SECS = 1.0


class PodLostError(UserError):
  """A pod can do no more; names it, its host, and in which phase that was.

  Attributes:
    pod: its number.
  """

  def __init__(self, pod: int, message: str):
    """Keeps both."""
    super().__init__(message)
    self.pod = pod


class PodWatch:
  """Watches the servers of a run; a context manager."""

  def __init__(
    self, servers: PodServers, addresses: Sequence[str], secs: float
  ):
    """Asks each server for the first time.

    Args:
      servers: those of this machine, if there are any.
      addresses: "host:port" of each pod's; none where pods are in process.
      secs: POD_TIMEOUT_SECS.

    Raises:
      PodLostError: one does not answer.
    """
    self._servers, self._addresses, self._secs = servers, addresses, secs
    self._lost: dict[int, str] = {}
    self._end = threading.Event()
    self._facts: list[ServerFacts] = []
    for pod in range(len(addresses)):
      try:
        self._facts.append(self._ask(pod))
      except NoAnswerError as error:
        raise self._error(pod, str(error), "at the start") from None

  def __enter__(self) -> "PodWatch":
    for pod in range(len(self._addresses)):
      threading.Thread(target=self._watch, args=[pod], daemon=True).start()
    return self

  def __exit__(self, *unused: object) -> None:
    self._end.set()

  @contextlib.contextmanager
  def during(self, phase: str) -> Iterator[None]:
    """Raises PodLostError where its body fails because a pod is lost.

    Args:
      phase: what the body does, as in "in step 8".
    """
    try:
      yield
    except tf.errors.OpError:
      if lost := self._find_lost():
        pod, how = lost
        raise self._error(pod, how, phase) from None
      raise

  def _find_lost(self) -> tuple[int, str] | None:
    """Returns a pod that is lost, and how."""
    if ended := self._servers.find_ended():
      return ended
    for pod in range(len(self._addresses)):
      if pod not in self._lost:
        self._look(pod)
    return next(iter(self._lost.items()), None)

  def _error(self, pod: int, how: str, phase: str) -> PodLostError:
    return PodLostError(
      pod,
      f"pod {pod}: its server {self._servers.name(pod, self._addresses[pod])} "
      f"{how}, {phase}; run the same command to go on.",
    )

  def _watch(self, pod: int) -> None:
    while not self._end.wait(self._secs * _PAUSE):
      self._look(pod)
      while pod in self._lost:
        host, _, port = self._addresses[pod].rpartition(":")
        cut(host, int(port))
        # It may be connected once more: to a stopped one, by the kernel.
        if self._end.wait(_CUT_AGAIN_SECS):
          return

  def _look(self, pod: int) -> None:
    """Notes whether a pod is lost."""
    try:
      if self._ask(pod).start != self._facts[pod].start:
        self._lost[pod] = "has been started anew"
    except NoAnswerError as error:
      self._lost[pod] = str(error)

  def _ask(self, pod: int) -> ServerFacts:
    """Asks once or twice."""
    start = time.monotonic()
    secs = self._secs * _QUESTION
    try:
      return ask(self._addresses[pod], secs)
    except NoAnswerError:
      try:
        return ask(self._addresses[pod], secs)
      except NoAnswerError as error:
        if time.monotonic() - start < secs:  # an answer, but not of ours
          raise
        raise NoAnswerError(
          f"has not answered for {self._secs:g} seconds"
        ) from error
