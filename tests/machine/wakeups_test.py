# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A thread with a short slice runs as soon as it is woken."""

import contextlib
import os
import platform
import threading

import pytest

from palm_mtf.machine import wakeups


def test_only_the_calling_thread_gets_a_short_slice():
  before = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
  found, slices = [], []

  def read():
    with contextlib.suppress(OSError):
      slices.append(wakeups.read_slice())

  def shorten():
    found.append(wakeups.shorten_slice())
    if found[0]:
      found.append(wakeups.read_slice())
      me = threading.get_native_id()
      found.append((os.sched_getscheduler(me), os.getpriority(0, me)))

  read()
  thread = threading.Thread(target=shorten)
  thread.start()
  thread.join()
  read()
  if not found[0]:
    pytest.skip("this kernel has no slices of threads")
  # 0.1 ms is the least that Linux's sched_setattr(2) accepts.
  assert found[1:] == [100_000, before]
  assert slices[0] == slices[1]


@pytest.mark.parametrize("name", ["Darwin", "Linux"])
def test_a_system_without_slices_is_left_as_it_is(monkeypatch, name):
  monkeypatch.setattr(platform, "system", lambda: name)
  monkeypatch.setattr(platform, "machine", lambda: "riscv64")
  assert not wakeups.shorten_slice()
