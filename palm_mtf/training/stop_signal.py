# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Stop signals: SIGINT, SIGTERM and SIGHUP end a run after the current step."""

import signal

from palm_mtf.machine.stop_signals import handled_signals


class StopRequest:
  """Handles the first stop signal by noting its name; a context manager.

  It notes none outside of the main thread.
  SIGINT or SIGTERM that comes again interrupts at once. SIGHUP never does: a
  terminal that closes may send it twice.
  """

  def __init__(self):
    self.signal_name = ""  # such as "SIGTERM" once one has come
    self._previous = {}

  def __enter__(self) -> "StopRequest":
    for number in handled_signals():
      self._previous[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *unused: object) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _note(self, number: int, unused_frame: object) -> None:
    self.signal_name = self.signal_name or signal.Signals(number).name
    if number != signal.SIGHUP:
      signal.signal(number, self._previous[number])
