# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""How fast this machine is just now, told by products around what is timed."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator

from palm_mtf._tf import tf
from palm_mtf.mesh.session import session_config
from palm_mtf.ops.bfloat16 import matmul

_SIZE = 1536  # of the product, as in peak_flops.py
PRODUCT_FLOPS = 2 * _SIZE**3
# Before and after a call products take so much of its time, and so long.
_SHARE, _LEAST_SECS = 0.15, 0.1


class Pace:
  """Times calls, and products around them.

  What other programs take from a call they take from the products too.

  Attributes:
    best_secs: least seconds of a product so far.
  """

  def __init__(self, multiply: Callable[[], object]):
    """Times nothing yet.

    Args:
      multiply: a product of matrices [1536, 1536].
    """
    self.best_secs = math.inf
    self._multiply = multiply
    self._last_secs = 0.0

  @property
  def flops_per_sec(self) -> float:
    """FLOP/s of the fastest product so far."""
    return PRODUCT_FLOPS / self.best_secs

  def timed(self, call: Callable[[], object]) -> tuple[float, float]:
    """Returns the seconds of a call, and the mean of those of products."""
    before = self._product_secs()
    start = time.perf_counter()
    call()
    self._last_secs = time.perf_counter() - start
    return self._last_secs, (before + self._product_secs()) / 2

  def _product_secs(self) -> float:
    """Returns the mean seconds of products."""
    least = max(_LEAST_SECS, _SHARE * self._last_secs)
    times = []
    while sum(times) < least:
      start = time.perf_counter()
      self._multiply()
      times.append(time.perf_counter() - start)
    self.best_secs = min(self.best_secs, *times)
    return statistics.mean(times)


def undisturbed_secs(
  secs: float, product_secs: float, best_secs: float
) -> float:
  """Returns the seconds of a call where nothing else runs.

  Example:
    A call of 3 s between products that took 1.5 times their best is 2 s.
  """
  return secs * min(1.0, best_secs / product_secs)


@contextlib.contextmanager
def pace(dtype: tf.DType) -> Iterator[Pace]:
  """Yields a pace of products of a dtype, with a session of its own."""
  with tf.Graph().as_default(), tf.Session(config=session_config(1)) as session:
    factor = tf.Variable(tf.ones([_SIZE, _SIZE], dtype), use_resource=True)
    session.run(factor.initializer)
    multiply = session.make_callable(matmul(factor, factor).op)
    multiply()  # makes its kernel
    yield Pace(multiply)
