# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs of learners in one process, whose messages cross no network."""

import contextlib
import threading
import time

from palm_mtf.learners import protocol
from palm_mtf.learners.decoupled import DecoupledLearner, list_fragments
from palm_mtf.learners.learner import open_learner


def over_the_wire(message):
  """Returns a message as its chunks give it."""
  first, *chunks = protocol.write_chunks(message)
  reader = protocol.MessageReader(first, lambda *_: None)
  for chunk in chunks:
    reader.take(chunk)
  return reader.end()


class Member(threading.Thread):
  """A learner that takes part until it is told to stop, or the run ends."""

  def __init__(self, handler, name, *, num_works=1000, secs=0.0, mesh=None):
    super().__init__(daemon=True)
    self._handler, self._name, self._left = handler, name, num_works
    self._secs, self._mesh = secs, mesh

  def run(self):
    handler, name = self._handler, self._name
    about = over_the_wire(handler.join(name, {"mesh": self._mesh})).header
    config = protocol.read_program(about["program"])
    given = (about[x] for x in ("num_rows", "seed", "frozen", "features"))
    names = dict(zip(("num_rows", "seed", "frozen", "features"), given))
    fragments = list_fragments(
      config.model, about["frozen"], about["fragments"]
    )
    with open_learner(config, **names) as pod:
      learner = DecoupledLearner(pod, fragments, about["outer_dtype"])
      while self._left:
        work = over_the_wire(handler.next(name, {}))
        if work.header["kind"] == "done":
          return
        if work.header["kind"] == "wait":
          time.sleep(0.01)
          continue
        self._left -= 1
        time.sleep(self._secs)
        result = over_the_wire(learner.do(work))
        wanted = handler.expect(name, result.header)
        protocol.check_same(wanted, protocol.specs_of(result.arrays))
        handler.contribute(name, result)
