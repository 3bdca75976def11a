# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A progress bar on stderr for work that is counted in bytes of text."""

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(
  description: str, num_bytes: int | None
) -> Iterator[Callable[[int], None]]:
  """Shows a bar while the body runs; gives a function to tell bytes done.

  Where `num_bytes` is None it shows what is done, but not what is left.

  Where stderr is no terminal nothing is shown.
  """
  from rich import progress
  from rich.console import Console

  console = Console(stderr=True)
  columns = (
    progress.TextColumn("{task.description}"),
    progress.BarColumn(),
    progress.DownloadColumn(),
    progress.TransferSpeedColumn(),
    progress.TimeRemainingColumn(),
  )
  with progress.Progress(
    *columns,
    console=console,
    transient=True,
    disable=not console.is_terminal,
  ) as bar:
    task = bar.add_task(description, total=num_bytes)
    yield lambda done: bar.advance(task, done)
