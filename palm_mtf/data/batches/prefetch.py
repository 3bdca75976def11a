# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Prefetching: a thread makes batches while a step runs."""

import concurrent.futures
from collections.abc import Callable

from palm_mtf.data.batches.batches import Batch


class Prefetcher:
  """Prefetches the batches of the next steps; a context manager."""

  def __init__(
    self, batch_of: Callable[[int], Batch], last_step: int, depth: int
  ):
    # A batch is a function of its step alone, counted from 0: one that was made
    # early and is never read is no loss.
    self._batch_of, self._last_step, self._depth = batch_of, last_step, depth
    self._thread = concurrent.futures.ThreadPoolExecutor(1, "batches")
    self._made: dict[int, concurrent.futures.Future[Batch]] = {}

  def __enter__(self) -> "Prefetcher":
    return self

  def __exit__(self, *exception: object) -> None:
    self._thread.shutdown(cancel_futures=True)

  def batch(self, step: int) -> Batch:
    """Returns the batch of a step, and starts to make `depth` more."""
    for each in range(step, min(step + 1 + self._depth, self._last_step)):
      if each not in self._made:
        self._made[each] = self._thread.submit(self._batch_of, each)
    return self._made.pop(step).result()
