# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf report`: one HTML page of one run, or of several to compare."""

import importlib.util
import os
import sys
from collections.abc import Sequence

from palm_mtf.disk import write_atomically
from palm_mtf.errors import UserError
from palm_mtf.report.page import page
from palm_mtf.report.runs import read_runs

_FILE = "report.html"


def report(*, model_dirs: Sequence[str], output: str | None) -> None:
  """Writes the page, and prints where it is.

  Args:
    model_dirs: of runs.
    output: the file to write; None is report.html in the first MODEL_DIR.

  Raises:
    UserError: there is no such run, its metrics.jsonl cannot be read, the page
      cannot be written, or Matplotlib is not installed.
  """
  if importlib.util.find_spec("matplotlib") is None:
    raise UserError(
      "palm_mtf report draws with Matplotlib, which is not installed: "
      f"{sys.executable} -m pip install 'matplotlib>=3.10,<4'"
    )
  path = os.path.expanduser(output or os.path.join(model_dirs[0], _FILE))
  if os.path.isdir(path):
    raise UserError(
      f"--output = {output!r}: is a folder; name a file in it, such as "
      f"{os.path.join(path, _FILE)!r}."
    )
  write_atomically(path, page(read_runs(model_dirs)).encode())
  print(path)
