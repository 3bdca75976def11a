# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Buffers live within the budget of their devices; what lacks bytes waits."""

import functools
import gc
import queue
import random
import threading
import time

import numpy as np
import pytest

from palm_mtf import runtime
from palm_mtf._tf import tf
from palm_mtf.runtime.client import turns
from palm_mtf.runtime.program import Program
from tests import processes
from tests.cases import slow
from tests.refusals import message_of

SECS = 20.0  # after which something that should have happened is missing
add_one = runtime.function(lambda x: x + 1)
total = runtime.function(lambda x: runtime.all_sum(x))


def rows(num_bytes):
  return np.zeros(num_bytes // 4, np.float32)


def test_a_program_that_does_not_fit_waits_while_others_continue():
  with runtime.connect(devices=2, budget=100) as client:
    a, b = client.slices("1", "1")
    kept = add_one.on(a)(rows(60))
    kept.wait()
    large = add_one.on(a)(rows(80))
    for _ in range(3):
      assert add_one.on(b)(rows(40)).fetch().tolist() == [1] * 10
    reader = add_one.on(b)(large)  # waits for a program that has not begun
    # It fits. But programs of a client get bytes in the order of their calls.
    later = add_one.on(a)(rows(40))
    time.sleep(0.2)
    assert not any(x.begun.done() for x in (large, reader, later))
    del kept
    gc.collect()
    large.made.result(SECS)
    assert reader.fetch().tolist() == [2] * 20
    del large, reader
    gc.collect()
    assert later.fetch().tolist() == [1] * 10


def test_a_gang_gets_the_bytes_of_all_its_devices_at_once():
  """Two programs that each had one device's bytes would wait forever."""
  with runtime.connect(devices=2, budget=100) as client:
    (both,) = client.slices("2")
    made = queue.SimpleQueue()

    def work():
      for _ in range(20):
        made.put(total.on(both)(rows(120)).fetch().sum())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
      thread.start()
    found = [made.get(timeout=SECS) for _ in range(60)]
    assert found == [0.0] * 60


def test_a_program_that_waits_too_long_for_its_own_client_fails(monkeypatch):
  """The client keeps the buffer, and waits for the program: a deadlock."""
  monkeypatch.setattr(turns, "_FULL_SECS", 0.2)
  with runtime.connect(devices=1, budget=100) as client:
    (a,) = client.slices("1")
    kept = add_one.on(a)(rows(60))
    kept.wait()
    assert message_of(lambda: add_one.on(a)(rows(80)).wait()) == (
      f"80 bytes on device '{client.devices[0]}': buffers keep 60 of its "
      "budget of 100, and none was freed for long; free some."
    )
    assert add_one.on(a)(kept).made.exception(SECS)  # 60 bytes
    assert add_one.on(a)(rows(40)).fetch().tolist() == [1] * 10


def test_a_failed_program_keeps_no_bytes():
  check = runtime.function(lambda x: tf.debugging.check_numerics(x, "bad x"))
  with runtime.connect(devices=1, budget=100) as client:
    (a,) = client.slices("1")
    failed = check.on(a)(np.full(20, np.nan, np.float32))
    with pytest.raises(tf.errors.InvalidArgumentError, match="bad x"):
      failed.wait()
    assert add_one.on(a)(rows(100)).fetch().tolist() == [1] * 25


@pytest.mark.parametrize("seed", [0, *(slow(x) for x in range(1, 6))])
def test_random_programs_all_run_within_the_budget(seed):
  """Their shards have 80 bytes of float32 or 160 of float64."""
  rng, budget = random.Random(seed), 1000
  with runtime.connect(devices=4, budget=budget) as client:
    slices = client.slices("1", "1", "2", "4")
    sizes = {tf.float32: 80, tf.float64: 160}
    stored = []
    with client.programs.graph.as_default():
      for device in client.devices:
        with tf.device(device):
          found = 0
          for dtype, size in sizes.items():
            named = {"dtypes": [dtype], "shared_name": f"buffers_{dtype.name}"}
            found += size * tf.raw_ops.MapSize(**named)
          stored.append(found)
    read_stored, removing = Program(outputs=stored), threading.Lock()
    remove = client._remove

    def remove_alone(*removed):  # it stores empty shards for a moment
      with removing:
        remove(*removed)

    client._remove = remove_alone
    live, ended = [], []
    for _ in range(40):
      slice_ = rng.choice(slices)
      dtype = rng.choice([np.float32, np.float64])
      readable = [x for x in live if x.slice is slice_ and x.dtype == dtype]
      if readable and rng.random() < 0.5:
        x = add_one.on(slice_)(rng.choice(readable))
      else:
        x = total.on(slice_)(np.zeros(20 * len(slice_.devices), dtype))
      ended.append(x.made)
      live.append(x)
      del x, readable
      while len(live) > 5:
        del live[rng.randrange(len(live))]
      if rng.random() < 0.2:
        with removing:
          assert max(client.programs.call(read_stored, has_turn=True)) <= budget
    live.clear()
    for made in ended:
      made.result(SECS)
    read = functools.partial(client.programs.call, read_stored, has_turn=True)
    processes.wait_for(lambda: not any(read()))
