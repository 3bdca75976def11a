# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The operations of operations.cc, where they can be compiled."""

import functools
import logging
from collections.abc import Sequence
from types import ModuleType

from palm_mtf._tf import tf
from palm_mtf.machine.cores import usable_cores
from palm_mtf.native.build import BuildError, compiled

_logger = logging.getLogger(__name__)


@functools.cache
def operations() -> ModuleType | None:
  """Returns the compiled operations; None, with a warning, without them."""
  try:
    return tf.load_op_library(compiled())
  except (BuildError, tf.errors.OpError) as error:
    reason = str(error).strip().splitlines()[0]
    _logger.warning(
      "training and decoding are not compiled for this CPU: a training step "
      "takes a tenth longer, decoding up to nine times as long: %s; "
      "install g++ 11 or newer, or name it by CXX",
      reason,
    )
    return None


def threads_here() -> int:
  """Returns the threads of an operation in this process, 0 without any."""
  return usable_cores() if operations() else 0


def with_shapes(
  after: Sequence[tf.Tensor], before: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
  """Returns results of an operation, which have the shapes of `before`."""
  for x, like in zip(after, before, strict=True):
    x.set_shape(like.shape)
  return list(after)
