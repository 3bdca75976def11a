# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the bench: `python -m tools.bench`, or `python PATH/tools/bench`."""

import sys
from pathlib import Path

if not __package__:  # run by its path, as worker processes are
  sys.path[0] = str(Path(__file__).resolve().parents[2])

from tools.bench.command import main

if __name__ == "__main__":
  sys.exit(main())
