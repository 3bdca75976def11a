# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's errors of files, as those of Python."""

import contextlib
import errno
from collections.abc import Iterator

from palm_mtf._tf import tf


@contextlib.contextmanager
def as_os_errors() -> Iterator[None]:
  """Raises OSError in place of TensorFlow's errors, for `writing` to name."""
  try:
    yield
  except tf.errors.ResourceExhaustedError as error:  # no space left
    raise OSError(errno.ENOSPC, error.message) from error
  except tf.errors.OpError as error:
    raise OSError(errno.EIO, error.message) from error
