# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs Python in separate processes, and waits for what they do."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

_PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
ROOT = Path(__file__).resolve().parent.parent


def environment(**variables: str) -> dict[str, str]:
  """Returns this process's environment and path, overridden by `variables`."""
  return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}


def start(
  *arguments: object, variables: dict[str, str] | None = None, **keywords
) -> subprocess.Popen:
  """Starts Python with arguments; its outputs are text pipes."""
  command = [sys.executable, *map(str, arguments)]
  return subprocess.Popen(
    command,
    text=True,
    env=environment(**variables or {}),
    **{**_PIPES, **keywords},
  )


def python(
  *arguments: object, variables: dict[str, str] | None = None, **keywords
) -> subprocess.CompletedProcess:
  """Runs Python with arguments to its end; returns exit code and output."""
  return subprocess.run(
    [sys.executable, *map(str, arguments)],
    check=False,
    text=True,
    env=environment(**variables or {}),
    **{**_PIPES, **keywords},
  )


def wait_until(happens: Callable[[], bool], process: subprocess.Popen) -> None:
  """Waits while a process runs; fails with its errors if it ends before."""
  while not happens():
    assert process.poll() is None, process.communicate()[1]
    time.sleep(0.001)


def wait_for(happens: Callable[[], bool], secs: float = 60.0) -> None:
  """Waits for at most this many seconds; fails after that."""
  end = time.monotonic() + secs
  while not happens():
    assert time.monotonic() < end, "it did not happen in time"
    time.sleep(0.01)


def is_running(pid: int) -> bool:
  """Returns whether a process exists and has not ended."""
  try:
    stat = Path(f"/proc/{pid}/stat").read_text()
  except FileNotFoundError:
    return False
  return stat.rpartition(")")[2].split()[0] != "Z"
