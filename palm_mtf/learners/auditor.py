# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The client's own learner, which computes audited tasks again."""

import contextlib
import threading
import time
from collections.abc import Iterator

from palm_mtf.config import Config
from palm_mtf.learners.decoupled import DecoupledHandler
from palm_mtf.learners.learner import Learner, open_learner
from palm_mtf.learners.rounds import AUDITOR, Rounds
from palm_mtf.learners.syncer import Work

_PAUSE_SECS = 0.05


@contextlib.contextmanager
def auditing(config: Config, handler: DecoupledHandler) -> Iterator[None]:
  """While the body runs, audits in a thread if AUDIT_BY is "client"."""
  rounds = handler.syncer
  if not isinstance(rounds, Rounds) or not rounds.has_auditor:
    yield
    return
  is_over = threading.Event()

  def run() -> None:
    try:
      with open_learner(
        config,
        num_rows=config.run.batch_sizes.size(0) // config.pods.num_pods,
        seed=config.run.seed,
        frozen=config.run.frozen,
        features=handler.features,
      ) as learner:
        while not is_over.wait(_PAUSE_SECS):
          _audit(rounds, handler, learner)
    except BaseException as error:
      rounds.failure = error  # `Rounds.tick` raises it

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  try:
    yield
  finally:
    is_over.set()
    thread.join()


def _audit(rounds: Rounds, handler: DecoupledHandler, learner: Learner) -> None:
  """Does one audit, if there is one."""
  with handler.changed:
    work = rounds.next(AUDITOR, time.monotonic())
    outer = dict(rounds.outer.parameters)
  if not isinstance(work, Work):
    return
  message = handler.make_message(work, outer)
  result = handler.make_learner(learner).do(message)
  moved = handler.unpack(work, result.arrays)
  with handler.changed:
    rounds.contribute(AUDITOR, work.number, moved, 0, time.monotonic())
    handler.changed.notify_all()
