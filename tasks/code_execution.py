# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a Python program that nobody has read, in a process with limits.

The process has a folder of its own that vanishes with it, an empty environment,
no input, and limits of time, memory, file size and open files; whoever is not
root cannot start processes in it either. What it started is ended with it. That
keeps accidents small and is no prison: it sees the network and every file that
its user sees. Run what you do not trust in a container, as a user who has
nothing to lose.
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from typing import BinaryIO, NamedTuple

# The limits are set by the process itself: Python must not run code between
# fork and exec where there are threads, as TensorFlow's.
_START = """
import os, resource, sys
names = ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_NOFILE",
         "RLIMIT_CORE", "RLIMIT_NPROC")
for name, limit in zip(names, map(int, sys.argv[1:]), strict=True):
  if hasattr(resource, name):
    resource.setrlimit(getattr(resource, name), (limit, limit))
os.execv(sys.executable, [sys.executable, "-I", "-B", "program.py"])
"""
_OPEN_FILES = 64


class Limits(NamedTuple):
  """What a program may use.

  Attributes:
    secs: seconds of the clock, and of one core.
    memory_bytes: bytes of address space, its interpreter's included.
    file_bytes: size of any file it writes.
  """

  secs: float = 10.0
  memory_bytes: int = 1 << 30
  file_bytes: int = 1 << 20


class Outcome(NamedTuple):
  """Whether a program ran to its last line, and if not, why."""

  passed: bool
  why: str


def run_program(program: str, limits: Limits) -> Outcome:
  """Runs a program and waits for it.

  A program has passed when it reaches its end: one that leaves early with exit
  code 0 has not.

  Args:
    program: in Python.
    limits: what it may use.

  Returns:
    Whether it passed.
  """
  mark = secrets.token_hex(16)
  with tempfile.TemporaryDirectory(prefix="palm_mtf_program_") as folder:
    path, done = (os.path.join(folder, x) for x in ("program.py", "done"))
    end = f"__import__('pathlib').Path({done!r}).write_text({mark!r})"
    with open(path, "w", encoding="utf-8") as file:
      file.write(f"{program}\n\n{end}\n")
    with tempfile.TemporaryFile() as errors:
      process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _START, *_numbers(limits)],
        cwd=folder,
        env={"HOME": folder, "TMPDIR": folder},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        start_new_session=True,
      )
      try:
        code = process.wait(limits.secs)
      except subprocess.TimeoutExpired:
        return Outcome(False, f"took more than {limits.secs:g} s")
      finally:
        _end(process)
      if _content(done) == mark:
        return Outcome(True, "")
      lines = _tail(errors).strip().splitlines()
  if lines:
    return Outcome(False, lines[-1])
  if code < 0:
    return Outcome(False, f"ended by {signal.Signals(-code).name}")
  return Outcome(False, f"ended early with exit code {code}")


def _numbers(limits: Limits) -> list[str]:
  return [
    str(number)
    for number in (
      int(limits.secs) + 1,
      limits.memory_bytes,
      limits.file_bytes,
      _OPEN_FILES,
      0,
      0,
    )
  ]


def _end(process: subprocess.Popen) -> None:
  """Ends the process and all of its group."""
  try:
    os.killpg(process.pid, signal.SIGKILL)
  except (ProcessLookupError, PermissionError):
    pass  # nothing of it is left
  process.wait()


def _content(path: str) -> str:
  """Returns what is in a file, or "" where there is none."""
  try:
    with open(path, encoding="utf-8", errors="replace") as file:
      return file.read(4096)
  except OSError:
    return ""


def _tail(file: BinaryIO) -> str:
  """Returns the last 4 KB of a file."""
  size = file.seek(0, os.SEEK_END)
  file.seek(max(0, size - 4096))
  return file.read().decode("utf-8", "replace")
