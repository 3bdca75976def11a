# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf report`: writes an HTML page about one run or several."""

import contextlib
import os
from collections.abc import Iterator, Sequence

from palm_mtf.checkpoints.lineage import INITIALISED, trace
from palm_mtf.checkpoints.manifest import (
  DamagedCheckpointError,
  checkpoint_folders,
  read_checkpoint,
)
from palm_mtf.errors import UserError
from palm_mtf.model_dir.atomic_files import write_atomically
from palm_mtf.model_dir.paths import ModelDir
from palm_mtf.report.lineage import render_lineage
from palm_mtf.report.page import check_can_draw, read_runs, render_page


def report(*, model_dirs: Sequence[str], output: str | None) -> None:
  """Writes an HTML page about runs, and prints the page's path.

  Raises UserError if a run cannot be read, the page cannot be written, or
  Matplotlib is not installed.
  """
  check_can_draw()
  path = os.path.expanduser(output or ModelDir(model_dirs[0]).report)
  if os.path.isdir(path):
    raise UserError(
      f"--output = {output!r}: is a folder; name a file in it, such as "
      f"{ModelDir(path).report!r}."
    )
  runs = read_runs(model_dirs)
  pictures = [line for path in model_dirs for line in _draw_lineage(path)]
  head = ["<h2>Lineage</h2>"] if pictures else []
  page = render_page(runs, head + pictures)
  # A run's JSON files may hold half of a surrogate pair, which UTF-8 cannot
  # encode, so write an XML character reference instead.
  write_atomically(path, page.encode(errors="xmlcharrefreplace"))
  print(path)


def _draw_lineage(model_dir: str) -> Iterator[str]:
  """Yields SVG of a run and its ancestors; nothing if it has none."""
  with contextlib.suppress(UserError, DamagedCheckpointError):
    for path in checkpoint_folders(os.path.expanduser(model_dir))[-1:]:
      found = read_checkpoint(path).manifest
      # Without parents there is nothing to hash.
      if found.base or found.teacher or found.origin not in (None, INITIALISED):
        yield from render_lineage([record for record, _ in trace(path)])
