# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Log lines and a progress bar on stderr; stdout is for results.

Control characters of texts, such as those of a sequence that sets a terminal's
clipboard, are escaped in log lines, and in results where stdout is a terminal.
Results that stdout does not take, such as a file on a full disk, are an error.

2026-11-22 11:28:15 palm_mtf: step 100/600  loss 5.211
2026-11-22 11:28:31 palm_mtf: warning: 2 of 4 files left out
"""

import contextlib
import io
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from palm_mtf.errors import UserError

# All of Unicode's control characters but tab and line feed.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def escaped(text: str) -> str:
  """Returns a text with control characters as Python writes them, \\x1b."""
  return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


class _Results:
  """A text stream for results: safe for a terminal, its errors one line."""

  def __init__(self, stream: TextIO):
    self._stream = stream
    self._is_terminal = stream.isatty()

  def write(self, text: str) -> int:
    with self._explained():
      self._stream.write(escaped(text) if self._is_terminal else text)
    return len(text)

  def flush(self) -> None:
    with self._explained():
      self._stream.flush()

  @contextlib.contextmanager
  def _explained(self) -> Iterator[None]:
    try:
      yield
    except BrokenPipeError:  # whoever reads the results has read enough
      raise
    except OSError as error:
      # What is left in the buffer would fail again at Python's exit.
      os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
      raise UserError(
        f"stdout cannot be written: {error.strerror}; give the results a place "
        "with room."
      ) from error

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)


@contextlib.contextmanager
def results_on_stdout() -> Iterator[None]:
  """Escapes control characters that the body prints to a terminal's stdout.

  A pipe or a file gets every character as it is.

  Raises:
    UserError: stdout cannot be written, as where a disk is full.
  """
  results = _Results(sys.stdout)
  with contextlib.redirect_stdout(results):
    try:
      yield
    finally:
      # A command that failed has its own error, and keeps its exit code.
      with contextlib.suppress(UserError, BrokenPipeError):
        results.flush()


def configure_logging() -> None:
  """Configures the logger of palm_mtf to write to stderr, once.

  Only a process of palm_mtf's own calls it: where the package is imported as a
  library, the importing program decides where records go.
  """
  _mend_streams()
  logger = logging.getLogger("palm_mtf")
  logger.setLevel(logging.INFO)
  # A handler of the root logger, such as absl's, would write each line again.
  logger.propagate = False
  logger.addHandler(_HANDLER)  # a handler that is there is not added again


def _mend_streams() -> None:
  """Opens the closed ones of stdin, stdout and stderr; nothing shown fails."""
  # In this order /dev/null takes the closed descriptor: the next file to be
  # opened, a checkpoint perhaps, would get it otherwise, and with it what C++
  # writes to its log.
  for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
    stream = getattr(sys, name)
    if stream is None:
      setattr(sys, name, open(os.devnull, mode))
    elif stream is not getattr(sys, f"__{name}__"):
      continue
    elif name == "stdin":
      # In any locale stdin is UTF-8, as files are. A byte that is not becomes
      # half of a surrogate pair, which no reader takes for text.
      with contextlib.suppress(io.UnsupportedOperation):  # was read before
        stream.reconfigure(encoding="utf-8", errors="surrogateescape")
    else:
      # Texts may have characters that the stream's encoding has not.
      stream.reconfigure(errors="backslashreplace")
  # Whatever writes to stderr, warnings, bars and tracebacks: a reader that has
  # ended, as of `2>&1 | tee`, or a terminal that was closed ends no run.
  if sys.stderr is sys.__stderr__:
    encoding = sys.stderr.encoding
    sys.stderr = io.TextIOWrapper(
      io.BufferedWriter(_Dropping(sys.stderr.fileno(), "wb", closefd=False)),
      encoding,
      errors="backslashreplace",
      line_buffering=True,
    )


class _Dropping(io.FileIO):
  """A file that drops what cannot be written."""

  def write(self, content: bytes) -> int:
    """Writes; returns the number of bytes written or dropped."""
    with contextlib.suppress(OSError):
      if (written := super().write(content)) is not None:
        return written
    return len(content)


class _StderrHandler(logging.Handler):
  """A handler that writes time, program, level and message to stderr."""

  def emit(self, record: logging.LogRecord) -> None:
    """Writes a record, or drops it where stderr is closed."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
    is_progress = record.levelno <= logging.INFO
    level = "" if is_progress else f"{record.levelname.lower()}: "
    line = f"{stamp} palm_mtf: {level}{escaped(self.format(record))}\n"
    with contextlib.suppress(ValueError):
      # sys.stderr is looked up for each record: while a progress bar is shown,
      # rich has put a stream there that writes above the bar.
      sys.stderr.write(line)
      sys.stderr.flush()


_HANDLER = _StderrHandler()


@contextlib.contextmanager
def progress_bar(
  description: str, total: int | None, *, counted: str = "bytes"
) -> Iterator[Callable[[int], None]]:
  """Shows a bar while the body runs; gives a function to tell what was done.

  Where stderr is no terminal nothing is shown.

  Args:
    description: name of the work.
    total: how much there is of it, or None where that is unknown.
    counted: unit of the count, "bytes" or another plural.
  """
  from rich import progress
  from rich.console import Console

  console = Console(stderr=True)
  amount = (
    (progress.DownloadColumn(), progress.TransferSpeedColumn())
    if counted == "bytes"
    else (progress.MofNCompleteColumn(), progress.TextColumn(counted))
  )
  with progress.Progress(
    progress.TextColumn("{task.description}"),
    progress.BarColumn(),
    *amount,
    progress.TimeRemainingColumn(),
    console=console,
    transient=True,
    disable=not console.is_terminal,
  ) as bar:
    task = bar.add_task(description, total=total)
    yield lambda done: bar.advance(task, done)
