# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches are made ahead by a thread, in order, each once."""

import threading
import time

import pytest

from palm_mtf.data.batches.prefetch import Prefetcher


class Batches:
  """Counts the batches that are made, and the threads that make them."""

  def __init__(self):
    self.made, self.threads = [], set()

  def batch(self, step):
    self.made.append(step)
    self.threads.add(threading.current_thread().name)
    return {"inputs": step}


@pytest.mark.parametrize(("first", "depth"), [(4, 3), (8, 5)])
def test_each_batch_is_that_of_its_step_made_once_and_none_after_the_last(
  first, depth
):
  batches = Batches()
  steps = [*range(first, 10)]
  with Prefetcher(batches.batch, 10, depth) as ahead:
    assert [ahead.batch(i)["inputs"] for i in steps] == steps
  assert batches.made == steps


def test_the_next_batches_are_made_by_another_thread():
  batches = Batches()
  with Prefetcher(batches.batch, 10, depth=2) as ahead:
    ahead.batch(0)
    assert ahead._made[2].result(timeout=10) == {"inputs": 2}
    assert 3 not in ahead._made
  assert threading.main_thread().name not in batches.threads


def test_an_error_is_raised_where_its_batch_is_asked_for():
  def batch_of(step):
    if step == 1:
      raise OSError("the disk is gone")
    return step

  with Prefetcher(batch_of, 5, depth=3) as ahead:
    assert ahead.batch(0) == 0
    with pytest.raises(OSError, match="gone"):
      ahead.batch(1)


def test_the_end_waits_for_no_batch_that_is_not_begun():
  made = []

  def batch_of(step):
    time.sleep(0.02)
    made.append(step)

  with Prefetcher(batch_of, 1000, depth=500) as ahead:
    ahead.batch(0)
  assert len(made) < 100
