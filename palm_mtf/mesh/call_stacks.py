# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The stack of calls that TensorFlow keeps with each operation, for errors."""

import contextlib
import threading
from collections.abc import Iterator

from palm_mtf._tf import tf_stack

# A function of TensorFlow is replaced here. It changes nothing outside of
# `one_call_stack`.
_extract_stack = tf_stack.extract_stack
_of_thread = threading.local()


def _stack(stacklevel: int = 1) -> tf_stack.StackSummary:
  shared = getattr(_of_thread, "shared", None)
  return _extract_stack(stacklevel + 1) if shared is None else shared


tf_stack.extract_stack = _stack


@contextlib.contextmanager
def one_call_stack() -> Iterator[None]:
  """Gives all operations that the body makes the stack of its caller.

  TensorFlow walks through all calls for each operation, which is a tenth of the
  time that a program's graph takes. The scope in an operation's name still says
  which operation of Mesh TensorFlow made it.
  """
  _of_thread.shared = _extract_stack(3)  # behind contextlib's two calls
  try:
    yield
  finally:
    _of_thread.shared = None
