# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs Python in processes of its own, which import what this one imports."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def environment(**variables: str) -> dict[str, str]:
  """Returns this process's environment and path, with `variables` over it."""
  return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}


def start(*arguments: object, **keywords) -> subprocess.Popen:
  """Starts Python with arguments, its outputs in pipes of text."""
  return subprocess.Popen(
    [sys.executable, *map(str, arguments)],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=environment(),
    **keywords,
  )


def python(
  *arguments: object, variables: dict[str, str] | None = None, **keywords
) -> subprocess.CompletedProcess:
  """Runs Python with arguments to its end, and returns what it printed."""
  return subprocess.run(
    [sys.executable, *map(str, arguments)],
    capture_output=True,
    check=False,
    text=True,
    env=environment(**variables or {}),
    **keywords,
  )
