# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a generated Python program in a process that confines itself.

The program cannot end, signal or read this process, start another process, or
use the network. It can read only Python's files and write only to its folder,
which is removed afterwards (program_process.py). If the kernel has no Landlock,
the program can read and change every file that its user can.
"""

import contextlib
import itertools
import json
import logging
import os
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from palm_mtf.errors import UserError
from palm_mtf.tasks import program_process

_logger = logging.getLogger(__name__)

_OPEN_FILES = 64


class Limits(NamedTuple):
  """Limits of a program.

  Attributes:
    secs: wall-clock seconds, and seconds of CPU time.
    memory_bytes: bytes of address space, including the interpreter's.
    file_bytes: maximum size of a file that the program writes.
  """

  secs: float = 10.0
  memory_bytes: int = 1 << 30
  file_bytes: int = 1 << 20


class Outcome(NamedTuple):
  """Whether a program ran to its last line and, if it did not, why."""

  passed: bool
  why: str


def run_program(program: str, limits: Limits) -> Outcome:
  """Runs a program, waits for its end, and returns whether it passed.

  Args:
    program: source text, in Python.
    limits: limits of its process.
  """
  # Exit code 0 is no proof, because sys.exit() in generated code skips the
  # tests below it. A program has passed if its process ran past the program's
  # last line and wrote the mark. No file, argument or environment variable
  # holds the mark, but a program that searches its own interpreter can find it.
  mark = secrets.token_hex(16)
  asked = {
    "program": program,
    "mark": mark,
    "limits": _numbers(limits),
    "parent": os.getpid(),
  }
  with (
    _folder() as folder,
    _pipe() as (reading, writing),
    tempfile.TemporaryFile() as errors,
  ):
    with subprocess.Popen(
      # -I: no environment variables of Python, no user site; -B: no bytecode.
      [sys.executable, "-I", "-B", program_process.__file__, str(writing)],
      cwd=folder,
      # The environment leaves out this process's tokens and keys. Temporary
      # files are in the folder, so that they are removed with it.
      env={"HOME": folder, "TMPDIR": folder},
      stdin=subprocess.PIPE,
      stdout=subprocess.DEVNULL,
      stderr=errors,
      pass_fds=[writing],
      start_new_session=True,
    ) as process:
      try:
        # Read the pipe later; it buffers what the process writes.
        process.communicate(json.dumps(asked).encode(), timeout=limits.secs)
      except subprocess.TimeoutExpired:
        return Outcome(False, f"took more than {limits.secs:g} s")
      finally:
        process.kill()
    os.set_blocking(reading, False)
    with contextlib.suppress(BlockingIOError):  # nothing was written
      if os.read(reading, 4096).decode("utf-8", "replace") == mark:
        return Outcome(True, "")
    lines = _tail(errors).strip().splitlines()
  if lines:
    return Outcome(False, lines[-1])
  code = process.returncode
  if code < 0:
    return Outcome(False, f"ended by {_signal_name(-code)}")
  return Outcome(False, f"ended early with exit code {code}")


def check_confined(limits: Limits) -> None:
  """Raises UserError if a program cannot be confined; warns without Landlock.

  Args:
    limits: limits of a program's process.
  """
  why = program_process.why_not_confined() or run_program("", limits).why
  if why:
    raise UserError(
      f"generated programs cannot be confined here: {why}; evaluate them on "
      "another machine, or raise code.programs.memory_bytes or .secs."
    )
  if not program_process.landlock_version():
    _logger.warning(
      "this kernel has no Landlock: generated programs may read and change "
      "every file of yours; run them in a container"
    )


def _numbers(limits: Limits) -> list[tuple[str, int]]:
  return [
    ("RLIMIT_CPU", int(limits.secs) + 1),
    ("RLIMIT_AS", limits.memory_bytes),
    ("RLIMIT_FSIZE", limits.file_bytes),
    ("RLIMIT_NOFILE", _OPEN_FILES),
    ("RLIMIT_CORE", 0),
  ]


@contextlib.contextmanager
def _folder() -> Iterator[str]:
  """Makes a folder for the body; removes it and its content afterwards."""
  folder = tempfile.mkdtemp(prefix="palm_mtf_program_")
  try:
    yield folder
  finally:
    try:
      _remove(folder)
    except OSError as error:
      _logger.warning(f"{folder}: cannot be removed: {error.strerror}")


def _remove(folder: str) -> None:
  """Removes a folder, however deep the folders in it are nested."""
  # Inner folders are moved to the top before they are opened, so that no path
  # gets too long and no recursion too deep.
  prefix = secrets.token_hex(8)  # a name that no entry has
  names = (f"{prefix}_{number}" for number in itertools.count())
  top = os.open(folder, os.O_RDONLY)
  try:
    while entries := [*_entries(top)]:
      for entry, is_folder in entries:
        if not is_folder:
          os.unlink(entry, dir_fd=top)
          continue
        inside = os.open(entry, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=top)
        try:
          for each, _ in _entries(inside):
            os.rename(each, next(names), src_dir_fd=inside, dst_dir_fd=top)
        finally:
          os.close(inside)
        os.rmdir(entry, dir_fd=top)
  finally:
    os.close(top)
  os.rmdir(folder)


def _entries(folder: int) -> Iterator[tuple[str, bool]]:
  """Yields each name, and whether it is a folder; makes folders accessible."""
  for name in os.listdir(folder):
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    is_folder = stat.S_ISDIR(found.st_mode)
    if is_folder:
      os.chmod(name, stat.S_IRWXU, dir_fd=folder)
    yield name, is_folder


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
  reading, writing = os.pipe()
  try:
    yield reading, writing
  finally:
    os.close(reading)
    os.close(writing)


def _signal_name(number: int) -> str:
  try:
    return signal.Signals(number).name
  except ValueError:  # a real-time signal
    return f"signal {number}"


def _tail(file: BinaryIO) -> str:
  """Returns the last 4 KB of a file."""
  size = file.seek(0, os.SEEK_END)
  file.seek(max(0, size - 4096))
  return file.read().decode("utf-8", "replace")
