# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A clean stop: SIGINT and SIGTERM ask, the loop answers between two steps."""

import signal


class StopRequest:
  """While it is entered, the first signal only sets `signal_name`.

  A second one acts as it did before: it interrupts at once.

  Attributes:
    signal_name: "SIGINT" or "SIGTERM" once one has come, else "".
  """

  def __init__(self):
    self.signal_name = ""
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
    self.__exit__()
