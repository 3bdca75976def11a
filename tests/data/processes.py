# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Processes that tests start, and limits and measures of this one."""

import contextlib
import os
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator


def start(
  program: str, environment: dict[str, str] | None = None, **settings: object
) -> subprocess.Popen:
  """Starts a Python program that imports what this process can import."""
  path = os.pathsep.join(sys.path)
  return subprocess.Popen(
    [sys.executable, "-c", program],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env={**os.environ, "PYTHONPATH": path, **(environment or {})},
    **settings,
  )


def output_of(program: str, **environment: str) -> str:
  """Returns what a Python program writes to stdout."""
  process = start(program, environment)
  output, errors = process.communicate()
  assert process.returncode == 0, errors
  return output


@contextlib.contextmanager
def disk_full_at(num_bytes: int) -> Iterator[None]:
  """Lets no file grow beyond `num_bytes`."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def peak_memory(work: Callable[[], object]) -> int:
  """Returns the most bytes that Python holds while `work` runs."""
  tracemalloc.start()
  work()
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  return peak
