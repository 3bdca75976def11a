# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The signals that ask a command to stop."""

import signal
import threading

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def handled_signals() -> list[signal.Signals]:
  """Returns the stop signals that a command in this thread handles.

  Signals that are already ignored (by nohup, or in a background job of a shell)
  stay ignored. Python lets only the main thread handle signals, so a command in
  another thread leaves signals to the program that called the command.
  """
  if threading.current_thread() is not threading.main_thread():
    return []
  return [x for x in _STOP_SIGNALS if signal.getsignal(x) != signal.SIG_IGN]


class StopRequest:
  """A context manager that handles the first stop signal by noting its name.

  Outside the main thread, no signal is handled. A second SIGINT or SIGTERM
  interrupts at once. SIGHUP never interrupts, because a terminal that closes
  may send it twice.
  """

  def __init__(self):
    self.signal_name = ""  # name of the first stop signal, such as "SIGTERM"
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
