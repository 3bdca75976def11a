# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Log lines and a progress bar on stderr; stdout is for results.

2026-11-22 11:28:15 palm_mtf: step 100/600  loss 5.211
2026-11-22 11:28:31 palm_mtf: warning: 2 of 4 files left out
"""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator


def configure_logging() -> None:
  """Configures the logger of palm_mtf to write to stderr, once.

  Only a process of palm_mtf's own calls it: where the package is imported as a
  library, the importing program decides where records go.
  """
  if sys.stderr is None:  # descriptor 2 was closed before the start
    # Takes descriptor 2: the next file to be opened, a checkpoint perhaps,
    # would get it otherwise, and with it what C++ writes to its log.
    sys.stderr = open(os.devnull, "w")
  logger = logging.getLogger("palm_mtf")
  logger.setLevel(logging.INFO)
  # A handler of the root logger, such as absl's, would write each line again.
  logger.propagate = False
  logger.addHandler(_HANDLER)  # a handler that is there is not added again


class _StderrHandler(logging.Handler):
  """A handler that writes time, program, level and message to stderr."""

  def emit(self, record: logging.LogRecord) -> None:
    """Writes a record, or drops it where stderr is closed or broken."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
    is_progress = record.levelno <= logging.INFO
    level = "" if is_progress else f"{record.levelname.lower()}: "
    line = f"{stamp} palm_mtf: {level}{self.format(record)}\n"
    # OSError: a pipe without a reader. ValueError: a closed file.
    with contextlib.suppress(OSError, ValueError):
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
