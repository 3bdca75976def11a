# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import signal
from concurrent import futures

from palm_mtf.machine.stop_signals import handled_signals

STOP = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def test_only_the_main_thread_handles_signals():
  assert handled_signals() == STOP
  with futures.ThreadPoolExecutor() as pool:
    assert pool.submit(handled_signals).result() == []


def test_what_is_ignored_stays_ignored():
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
  try:
    assert handled_signals() == STOP[:2]
  finally:
    signal.signal(signal.SIGHUP, before)
