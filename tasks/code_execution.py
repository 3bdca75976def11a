# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a generated Python program in a process with limits.

The limits keep accidents small and are no sandbox: the program sees the network
and every file that its user sees. Run what you do not trust in a container.
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from typing import BinaryIO, NamedTuple

# The process limits itself and then becomes the program: a preexec_fn would run
# Python between fork and exec, which may deadlock beside TensorFlow's threads.
# -I: no environment variables of Python, no user site; -B: no bytecode files.
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
  """Limits of a program.

  Attributes:
    secs: wall-clock seconds, and seconds of CPU time.
    memory_bytes: bytes of address space, with the interpreter's.
    file_bytes: bytes of any one file that it writes.
  """

  secs: float = 10.0
  memory_bytes: int = 1 << 30
  file_bytes: int = 1 << 20


class Outcome(NamedTuple):
  """Whether a program ran to its last line, and why not."""

  passed: bool
  why: str


def run_program(program: str, limits: Limits) -> Outcome:
  """Runs a program, waits for its end, and returns whether it passed.

  Args:
    program: source text, in Python.
    limits: limits of its process.
  """
  # Exit code 0 is no proof: sys.exit() in generated code skips the tests below
  # it. A program has passed when the line added at its end, which writes a
  # random mark, was reached.
  mark = secrets.token_hex(16)
  with tempfile.TemporaryDirectory(prefix="palm_mtf_program_") as folder:
    path, done = (os.path.join(folder, x) for x in ("program.py", "done"))
    end = f"__import__('pathlib').Path({done!r}).write_text({mark!r})"
    with open(path, "w", encoding="utf-8") as file:
      file.write(f"{program}\n\n{end}\n")
    with tempfile.TemporaryFile() as errors:
      # A session of its own, so that _end reaches what it starts.
      process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _START, *_numbers(limits)],
        cwd=folder,
        # No tokens or keys of this process; temporary files go with the folder.
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
        _end(process)  # also of a program that passed, and left others behind
      if _content(done) == mark:
        return Outcome(True, "")
      lines = _tail(errors).strip().splitlines()
  if lines:
    return Outcome(False, lines[-1])
  if code < 0:
    return Outcome(False, f"ended by {signal.Signals(-code).name}")
  return Outcome(False, f"ended early with exit code {code}")


def _numbers(limits: Limits) -> list[str]:
  # In the order of the names in _START. The two zeros: no core file, and no
  # further process (root is exempt from RLIMIT_NPROC).
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
  """Kills the process and its group."""
  try:
    os.killpg(process.pid, signal.SIGKILL)
  except (ProcessLookupError, PermissionError):
    pass  # nothing of it is left
  process.wait()


def _content(path: str) -> str:
  """Returns the first 4 KB of a file, "" where there is none."""
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
