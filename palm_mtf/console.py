# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Log lines and a progress bar on stderr; stdout is for results.

Control characters of texts, such as those of a sequence that sets a terminal's
clipboard, are escaped in log lines, and in results where stdout is a terminal.

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

# All of Unicode's control characters but tab and line feed.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def escaped(text: str) -> str:
  """Returns a text with control characters as Python writes them, \\x1b."""
  return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


class _EscapingStream:
  """A text stream that escapes what is written."""

  def __init__(self, stream: TextIO):
    self._stream = stream

  def write(self, text: str) -> int:
    self._stream.write(escaped(text))
    return len(text)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)


@contextlib.contextmanager
def terminal_is_safe() -> Iterator[None]:
  """Escapes control characters that the body prints to a terminal's stdout.

  A pipe or a file gets every character as it is.
  """
  if sys.stdout is None or not sys.stdout.isatty():
    yield
    return
  with contextlib.redirect_stdout(_EscapingStream(sys.stdout)):
    yield


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
