# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import os
import signal
from concurrent import futures

import pytest

from palm_mtf.machine.process import StopRequest, handled_signals

STOP = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def test_only_the_main_thread_handles_signals():
  assert handled_signals() == STOP
  with futures.ThreadPoolExecutor() as pool:
    assert pool.submit(handled_signals).result() == []


def send(number):
  os.kill(os.getpid(), number)


def test_the_first_signal_counts_and_the_same_again_interrupts():
  with StopRequest() as stop:
    assert stop.signal_name == ""
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGINT):
      send(number)
      assert stop.signal_name == "SIGHUP"
    with pytest.raises(KeyboardInterrupt):
      send(signal.SIGINT)
  with pytest.raises(KeyboardInterrupt):
    send(signal.SIGINT)


def test_a_signal_that_was_ignored_before_stays_ignored():
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
  try:
    with StopRequest() as stop:
      send(signal.SIGHUP)
      assert stop.signal_name == ""
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
  finally:
    signal.signal(signal.SIGHUP, before)
