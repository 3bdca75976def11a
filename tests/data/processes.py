# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Limits and measures of this process."""

import contextlib
import resource
import tracemalloc
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def disk_full_at(num_bytes: int) -> Iterator[None]:
  """Prevents files from growing beyond `num_bytes`."""
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
