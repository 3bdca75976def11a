# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Renders a chat template in a process, which can be killed if it hangs."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

from palm_mtf.machine.process import make_child_environment

# Default for a request: so long may a client wait, even on a busy machine. The
# process itself limits its processor time to less.
MOST_SECS = 5.0


class RenderError(Exception):
  """A template cannot be rendered; the message says why."""


class ChatRenderer:
  """A template and its process, which is restarted if it has ended.

  Several threads may use a renderer; a lock lets one render at a time.
  """

  def __init__(self, template: str, most_secs: float = MOST_SECS):
    """Starts the process, which compiles the template.

    A rendering fails if it takes more than `most_secs` seconds. Raises
    RenderError if the template is damaged.
    """
    self._template, self._most_secs = template, most_secs
    self._lock = threading.Lock()
    self._process = self._start()

  def render(self, values: Mapping[str, Any]) -> tuple[str, list[list[int]]]:
    """Returns the rendered text, and its runs [origin, number of characters].

    An origin (MESSAGE, TEMPLATE or UNKNOWN) says who wrote the characters.

    Raises RenderError if the template raises an error, or needs too much time
    or memory.
    """
    with self._lock:
      if self._process.poll() is not None:
        self._process = self._start()
      found = _ask(self._process, values, self._most_secs)
    return found["text"], found["origins"]

  def _start(self) -> Any:  # Any, because mypy takes Popen's pipes for None
    process = subprocess.Popen(
      [
        *(sys.executable, "-m", "palm_mtf.data.vocabulary.chat_process"),
        str(os.getpid()),
      ],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      env=make_child_environment(),
    )
    weakref.finalize(self, _end, process)
    found = _ask(process, {"template": self._template}, self._most_secs)
    # Names of the fields that the template may read in a message.
    self.fields = frozenset(found["fields"])
    return process


def _ask(process: Any, asked: Mapping[str, Any], most_secs: float) -> Any:
  try:
    line = json.dumps(asked)
  except RecursionError:
    raise RenderError("the messages are nested too deep") from None
  timer = threading.Timer(most_secs, process.kill)
  begin = time.monotonic()
  timer.start()
  try:
    process.stdin.write(f"{line}\n".encode())
    process.stdin.flush()
    answer = process.stdout.readline()
  except BrokenPipeError:
    answer = b""
  finally:
    timer.cancel()
  if not answer.endswith(b"\n"):
    is_late = time.monotonic() - begin >= most_secs
    code = process.wait()
    _end(process)
    if is_late or code == -signal.SIGXCPU:
      raise RenderError(f"it takes more than {most_secs:g} seconds")
    why = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
    raise RenderError(f"its process ended with {why}")
  found = json.loads(answer)
  if "error" in found:
    raise RenderError(found["error"])
  return found


def _end(process: Any) -> None:
  process.kill()
  process.wait()
  process.stdout.close()
  with contextlib.suppress(BrokenPipeError):  # close() writes what is unsent
    process.stdin.close()
