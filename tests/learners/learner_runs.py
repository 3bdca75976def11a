# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs of learners in one process, whose messages cross no network."""

import threading
import time

from palm_mtf.learners import protocol
from palm_mtf.learners.volunteer import describe_kernels, take_part


def _over_the_wire(message, check=lambda *_: None):
  """Returns a message as its chunks give it."""
  first, *chunks = protocol.write_chunks(message)
  reader = protocol.MessageReader(first, check)
  for chunk in chunks:
    reader.take(chunk)
  return reader.end()


class LeftError(Exception):
  """A learner leaves, and says nothing."""


class Member:
  """A learner; calls the handler like LearnerClient.

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

  def join(self, header):
    """Returns the handler's answer."""
    return _over_the_wire(self._handler.join(self._name, header)).header

  def next(self, header, check):
    """Returns the handler's answer."""
    if not self._left:
      raise LeftError
    answer = _over_the_wire(self._handler.next(self._name, header), check)
    if "secs" in answer.header:
      answer.header["secs"] = 0.01
    return answer

  def contribute(self, message):
    """Sends a result."""
    time.sleep(self._secs)
    self._left -= 1

    def check(header, given):
      protocol.check_same(self._handler.expect(self._name, header), given)

    result = _over_the_wire(message, check)
    return self._handler.contribute(self._name, result).header
