# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches that a thread makes while a step runs."""

import concurrent.futures
from collections.abc import Callable

from palm_mtf.data.batches.batches import Batch


class Prefetcher:
  """Makes the batches of the next steps ahead; use it as a context manager.

  A batch is a function of its step alone, so that nothing shows in it of when
  it was made, and one that is never read is no loss.
  """

  def __init__(
    self, batch_of: Callable[[int], Batch], last_step: int, depth: int
  ):
    """Makes nothing yet.

    Args:
      batch_of: returns the batch of a step, counted from 0.
      last_step: the step that has no batch, nor those after it.
      depth: how many batches are made ahead.
    """
    self._batch_of, self._last_step, self._depth = batch_of, last_step, depth
    self._thread = concurrent.futures.ThreadPoolExecutor(1, "batches")
    self._made: dict[int, concurrent.futures.Future[Batch]] = {}

  def __enter__(self) -> "Prefetcher":
    return self

  def __exit__(self, *exception: object) -> None:
    self._thread.shutdown(cancel_futures=True)

  def batch(self, step: int) -> Batch:
    """Returns the batch of a step, and has those after it made."""
    for each in range(step, min(step + 1 + self._depth, self._last_step)):
      if each not in self._made:
        self._made[each] = self._thread.submit(self._batch_of, each)
    return self._made.pop(step).result()
