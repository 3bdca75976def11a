# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Stop signals: SIGINT and SIGTERM end a run after the current step."""

import signal


class StopRequest:
  """Handles the first stop signal by noting its name; a context manager."""

  def __init__(self):
    self.signal_name = ""  # "SIGINT" or "SIGTERM" once one has come
    self._previous = {}

  def __enter__(self) -> "StopRequest":
    for number in (signal.SIGINT, signal.SIGTERM):
      self._previous[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *unused: object) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _note(self, number: int, unused_frame: object) -> None:
    self.signal_name = signal.Signals(number).name
    self.__exit__()  # a second signal interrupts at once
