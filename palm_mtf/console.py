# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Log lines and a progress bar on stderr; results and tables on stdout.

Control characters, which might for example set a terminal's clipboard, are
escaped in log lines, and also in results if stdout is a terminal. It is an
error if results cannot be written, for example because the disk is full.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text

# All control characters of Unicode except tab and line feed.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def escape(text: str) -> str:
  """Returns a text with its control characters written as in Python, \\x1b."""
  return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


class _Results:
  """A stream that escapes text for a terminal; failed writes are UserErrors."""

  def __init__(self, stream: TextIO):
    self._stream = stream
    self._is_terminal = stream.isatty()

  def write(self, text: str) -> int:
    with self._explain_errors():
      self._stream.write(escape(text) if self._is_terminal else text)
    return len(text)

  def flush(self) -> None:
    with self._explain_errors():
      self._stream.flush()

  @contextlib.contextmanager
  def _explain_errors(self) -> Iterator[None]:
    try:
      yield
    except BrokenPipeError:  # the reader of stdout has read enough
      raise
    except OSError as error:
      # Discard the buffer, because Python's write at exit would fail again.
      os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
      raise UserError(
        f"stdout cannot be written: {error.strerror}; send the results to a "
        "disk with free space."
      ) from error

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)


@contextlib.contextmanager
def results_on_stdout() -> Iterator[None]:
  """If stdout is a terminal, escapes control characters that the body prints.

  Raises UserError if stdout cannot be written, for example to a full disk.
  """
  results = _Results(sys.stdout)
  with contextlib.redirect_stdout(results):
    try:
      yield
    finally:
      # Ignore errors here, so that they do not replace an error of the body.
      with contextlib.suppress(UserError, BrokenPipeError):
        results.flush()


def configure_logging() -> None:
  """Makes the logger of palm_mtf write to stderr; may be called again.

  Only palm_mtf's own processes call this. A program that imports the package as
  a library decides where log records go.
  """
  _repair_streams()
  logger = logging.getLogger("palm_mtf")
  logger.setLevel(logging.INFO)
  # Handlers of the root logger, such as absl's, would print each record again.
  logger.propagate = False
  logger.addHandler(_HANDLER)  # no effect in a second call


def _repair_streams() -> None:
  """Opens /dev/null for closed standard streams; ignores errors of stderr."""
  # Open in the order of descriptors, 0 to 2. Otherwise the next opened file,
  # perhaps a checkpoint, would get descriptor 2, to which C++ code logs.
  for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
    stream = getattr(sys, name)
    if stream is None:
      setattr(sys, name, open(os.devnull, mode))
    elif stream is not getattr(sys, f"__{name}__"):
      continue
    elif name == "stdin":
      # Read stdin as UTF-8 in any locale, like files. An invalid byte becomes
      # half of a surrogate pair, which user_text.py rejects.
      with contextlib.suppress(io.UnsupportedOperation):  # if already read
        stream.reconfigure(encoding="utf-8", errors="surrogateescape")
    else:
      # A printed text may have characters that the stream's encoding lacks.
      stream.reconfigure(errors="backslashreplace")
  # A run must not end because a write to stderr fails: the reader of a pipe
  # such as `2>&1 | tee` may have ended, or the terminal may be closed.
  if sys.stderr is sys.__stderr__:
    encoding = sys.stderr.encoding
    sys.stderr = io.TextIOWrapper(
      io.BufferedWriter(_Dropping(sys.stderr.fileno(), "wb", closefd=False)),
      encoding,
      errors="backslashreplace",
      line_buffering=True,
    )


class _Dropping(io.FileIO):
  """A file, for stderr, that ignores failed writes."""

  def write(self, content: bytes) -> int:
    with contextlib.suppress(OSError):
      if (written := super().write(content)) is not None:
        return written
    return len(content)


class _StderrHandler(logging.Handler):
  """A log handler that writes time, program, level and message to stderr."""

  def emit(self, record: logging.LogRecord) -> None:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
    is_progress = record.levelno <= logging.INFO
    level = "" if is_progress else f"{record.levelname.lower()}: "
    line = f"{stamp} palm_mtf: {level}{escape(self.format(record))}\n"
    with contextlib.suppress(ValueError):
      # Look up sys.stderr for each record: while rich shows a progress bar,
      # sys.stderr is a stream that writes above the bar.
      sys.stderr.write(line)
      sys.stderr.flush()


_HANDLER = _StderrHandler()


def print_results(
  results: Mapping[str, Any], as_json: bool, space: str = "_"
) -> None:
  """Prints results as one JSON object, or else as a line for each result.

  If a result is a mapping, each of its entries gets a line. Each "_" of a name
  is printed as `space`, but not in JSON.
  """
  if as_json:
    print(json_text(results))
    return
  width = max(map(len, results)) + 2
  for name, value in results.items():
    lines = [_format_result(value)]
    if isinstance(value, Mapping):
      lines = [f"{key} {_format_result(x)}" for key, x in value.items()]
    for line in lines or ["none"]:
      print(f"{name.replace('_', space):{width}}{line}")


def _format_result(value: object) -> str:
  if isinstance(value, bool):
    return "yes" if value else "no"
  if isinstance(value, float):
    return f"{value:.4f}" if abs(value) >= 0.1 else f"{value:.3g}"
  if isinstance(value, list):
    return ", ".join(map(repr, value)) or "none"
  return f"{value:,}" if isinstance(value, int) else str(value) or "none"


def format_table(rows: Iterable[Sequence[str]], sides: str) -> str:
  """Returns rows of cells as lines; `sides` has "<" or ">" for each column."""
  rows = list(rows)
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = []
  for row in rows:
    cells = (f"{x:{y}{z}}" for x, y, z in zip(row, sides, widths, strict=True))
    lines.append("  ".join(cells).rstrip())
  return "\n".join(lines)


@contextlib.contextmanager
def progress_bar(
  description: str, total: int | None, *, counted: str = "bytes"
) -> Iterator[Callable[[int], None]]:
  """If stderr is a terminal, shows a progress bar while the body runs.

  Yields a function that adds an amount to the work done. `total` is the amount
  of work, in units of `counted`, or None if unknown. `counted` is the unit of
  the amounts, "bytes" or another plural noun.
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
