# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The signals that ask a command to stop."""

import signal
import threading

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def handled_signals() -> list[signal.Signals]:
  """Returns the stop signals that a command in this thread handles.

  What nohup, or a shell that starts a background job, has ignored stays
  ignored. Python lets only the main thread handle signals: a command in
  another thread leaves them to the program that called it.
  """
  if threading.current_thread() is not threading.main_thread():
    return []
  return [x for x in _STOP_SIGNALS if signal.getsignal(x) != signal.SIG_IGN]
