# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A process for work on a stranger's input, which can be killed if it hangs.

stdin   one JSON object per line: a question
stdout  one JSON object per line: its answer; or {"error": REASON}
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from palm_mtf.machine.process import die_with, make_child_environment


class HelperError(Exception):
  """A question has no answer; the message says why."""


class HelperProcess:
  """A process that answers questions; it is restarted if it has ended.

  Several threads may ask; a lock lets them ask one after the other. The process
  ends with the thread that started it, because of `die_with`.
  """

  def __init__(self, module: str, first: Mapping[str, Any], most_secs: float):
    """Starts the process, and asks the question `first`.

    `module` is a name such as "palm_mtf.x.y". Raises HelperError.
    """
    self._module, self._first, self._start_secs = module, first, most_secs
    self._lock = threading.Lock()
    self._process = self._start(most_secs)

  def ask(self, asked: Mapping[str, Any], most_secs: float) -> dict[str, Any]:
    """Returns the answer to a question.

    Raises HelperError if the answer is an error, or takes too much time or
    memory.
    """
    with self._lock:
      if self.has_ended:
        self._process = self._start(self._start_secs)
      return _ask(self._process, asked, most_secs)

  @property
  def has_ended(self) -> bool:
    """Whether the process has ended, such as because it was too slow."""
    return self._process.poll() is not None

  def _start(
    self, most_secs: float
  ) -> Any:  # mypy takes Popen's pipes for None
    process = subprocess.Popen(
      [sys.executable, "-m", self._module, str(os.getpid())],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      env=make_child_environment(),
      start_new_session=True,  # for `_kill`
    )
    weakref.finalize(self, _end, process)
    self.first_answer = _ask(process, self._first, most_secs)
    return process


def _ask(process: Any, asked: Mapping[str, Any], most_secs: float) -> Any:
  try:
    line = json.dumps(asked)
  except RecursionError:
    raise HelperError("the messages are nested too deep") from None
  timer = threading.Timer(most_secs, _kill, [process])
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
    if is_late:
      raise HelperError(f"it takes more than {most_secs:g} seconds")
    if code == -signal.SIGXCPU:
      raise HelperError("it takes too much processor time")
    why = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
    raise HelperError(f"its process ended with {why}")
  found = json.loads(answer)
  if "error" in found:
    raise HelperError(found["error"])
  return found


def _kill(process: Any) -> None:
  # Children that the process forked would keep its stdout open: kill them too.
  # If the process was waited for, another group may have its number.
  if process.returncode is None:
    os.killpg(process.pid, signal.SIGKILL)


def _end(process: Any) -> None:
  _kill(process)
  process.wait()
  process.stdout.close()
  with contextlib.suppress(BrokenPipeError):  # close() writes what is unsent
    process.stdin.close()


def _limit(kind: int, most: int) -> None:
  _, hard = resource.getrlimit(kind)
  most = most if hard == resource.RLIM_INFINITY else min(most, hard)
  resource.setrlimit(kind, (most, hard))


def answer_questions(
  answer: Callable[[Any], Mapping[str, Any]], *, most_bytes: int, cpu_secs: int
) -> None:
  """Answers the questions of a HelperProcess, until stdin is closed.

  `most_bytes` limits this process's address space, and `cpu_secs` its processor
  time per question. An exception becomes an error.
  """
  die_with(int(sys.argv[1]))
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends only the client
  _limit(resource.RLIMIT_AS, most_bytes)
  _limit(resource.RLIMIT_CORE, 0)
  # What a stranger's program prints must not be taken for an answer.
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)
  for line in sys.stdin:
    times = os.times()
    _limit(resource.RLIMIT_CPU, int(times.user + times.system) + cpu_secs)
    try:
      found = answer(json.loads(line))
    except HelperError as error:
      found = {"error": str(error)}
    except Exception as error:  # strangers' programs raise any exception
      found = {"error": f"{type(error).__name__}: {error}"[:1000]}
    print(json.dumps(found), file=answers, flush=True)
