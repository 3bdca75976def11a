# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Loads the operations in C++, if they can be compiled."""

import ctypes
import dataclasses
import functools
import logging
from collections.abc import Sequence
from types import ModuleType

from palm_mtf._tf import tf
from palm_mtf.machine.processors import usable_cores
from palm_mtf.native.build import BuildError, open_library, read_build_options

_logger = logging.getLogger(__name__)

# {statistic of a norm (architecture/block.py): whether it subtracts the mean}.
# TensorFlow's operations compute norms of other statistics.
IS_CENTERED = {"variance": True, "mean_square": False}


@dataclasses.dataclass(frozen=True)
class _Loaded:
  module: ModuleType | None  # the operations; None if they cannot be compiled
  built_with: str  # options and version of the compiler; "none" if not compiled
  library: ctypes.CDLL | None = None  # for functions that are no operations


@functools.cache
def _load() -> _Loaded:
  try:
    path, content = open_library()
    module = tf.load_op_library(path)
    options = read_build_options(content)
    return _Loaded(module, options, ctypes.CDLL(path))
  except (BuildError, OSError, tf.errors.OpError) as error:
    reason = str(error).strip().splitlines()[0]
    _logger.warning(
      "training and decoding are not compiled for this CPU: a training step "
      f"takes a tenth longer, decoding up to nine times as long: {reason}"
    )
    return _Loaded(None, "none")


def operations() -> ModuleType | None:
  """Returns the compiled operations; None if they cannot be compiled."""
  return _load().module


def library() -> ctypes.CDLL | None:
  """Returns the compiled functions; None if they cannot be compiled."""
  return _load().library


def operations_built_with() -> str:
  """Returns options and version of the operations' compiler, or "none"."""
  return _load().built_with


def threads_here() -> int:
  """Returns how many threads a C++ operation uses; 0 if none is compiled."""
  return usable_cores() if operations() else 0


def set_shapes(
  after: Sequence[tf.Tensor], before: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
  """Sets the unknown shapes of C++ outputs `after` to those of `before`."""
  for x, like in zip(after, before, strict=True):
    x.set_shape(like.shape)
  return list(after)
