# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether this process belongs to palm_mtf or to a program that imports it.

Commands, server processes and benchmarks own their process: they call
`own_process` first, and then change its allocator, its garbage collector, the
log levels of TensorFlow and the packages that TensorFlow imports. A program
that imports `palm_mtf.unitransformer` or `palm_mtf.foreign_models` keeps its
settings.
"""

import os

from palm_mtf.machine.host_memory import limit_arenas

_is_owned = False


def own_process() -> None:
  """Takes this process over, before it has threads and imports TensorFlow."""
  global _is_owned
  _is_owned = True
  # TensorFlow reads the level at its import, which a module of the user may
  # do first. Errors are Python exceptions.
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  limit_arenas()


def is_owned() -> bool:
  """Returns whether `own_process` was called."""
  return _is_owned
