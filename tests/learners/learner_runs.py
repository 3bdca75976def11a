# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs of learners in one process, whose messages cross no network."""

import threading
import time

from palm_mtf.learners import protocol
from palm_mtf.learners.client import LearnerClient
from palm_mtf.learners.volunteer import describe_kernels, take_part


def _over_the_wire(message, check):
  """Returns a message as its chunks give it."""
  first, *chunks = protocol.write_chunks(message)
  reader = protocol.MessageReader(first, check)
  for chunk in chunks:
    reader.take(chunk)
  return reader.end()


class LeftError(Exception):
  """A learner leaves, and says nothing."""


class Member(LearnerClient):
  """A learner whose messages cross no network.

  `num_works` is how many results it sends before it leaves; `secs` is how much
  longer a work takes; `mesh` is its own mesh. It begins after merge `after`.
  """

  def __init__(
    self, handler, name, *, num_works=1000, secs=0.0, mesh=None, after=0
  ):
    self._handler, self._name, self._left = handler, name, num_works
    self._secs, self._mesh, self._after = secs, mesh or {}, after

  def start(self):
    """Takes part, in a thread, which is returned."""
    thread = threading.Thread(target=self._run, daemon=True)
    thread.start()
    return thread

  def _run(self):
    while self._handler.syncer.outer.num_merges < self._after:
      time.sleep(0.01)
    try:
      take_part(self, {"kernels": describe_kernels()}, self._mesh)
    except LeftError:
      pass

  def call(self, method, message, check=None):
    """Returns the handler's answer."""
    given = message.header
    if method == "next" and not self._left:
      raise LeftError
    if method == "contribute":
      time.sleep(self._secs)
      self._left -= 1
      wanted = self._handler.expect(self._name, given)
      given = _over_the_wire(
        message, lambda _, found: protocol.check_same(wanted, found)
      )
    answer = getattr(self._handler, method)(self._name, given)
    answer = _over_the_wire(answer, check or protocol.at_most(0))
    if "secs" in answer.header:
      answer.header["secs"] = 0.01
    return answer
