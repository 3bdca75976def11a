# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a command says to people, on stderr: lines, and a progress bar.

Stdout is for results.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator


def say(line: str) -> None:
  """Writes one line of the program's own to stderr."""
  print(f"palm_mtf: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_bar(
  description: str, total: int | None, *, counted: str = "bytes"
) -> Iterator[Callable[[int], None]]:
  """Shows a bar while the body runs; gives a function to tell what was done.

  Where stderr is no terminal nothing is shown.

  Args:
    description: name of the work.
    total: how much there is of it, or None where that is unknown.
    counted: what is counted, "bytes" or the name of something else.
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
