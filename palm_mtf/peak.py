# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The matrix-product rate of this machine: what MFU is measured against.

A CPU's data sheet gives no useful peak, so CHIP = "measured" times a product
large enough to reach it. Chips with a published peak are in
accounting/hardware.py.
"""

import time

from palm_mtf._tf import tf
from palm_mtf.accounting.hardware import peak_flops_per_sec

_SIZE = 2048
_REPEATS = 8


def chip_flops_per_sec(chip: str, activation_dtype: str) -> float:
  """Returns the peak of `chip`, measuring it when that is "measured"."""
  if chip != "measured":
    return float(peak_flops_per_sec(chip))
  return _measure_product(tf.as_dtype(activation_dtype))


def _measure_product(dtype: tf.DType) -> float:
  """Returns FLOP/s of a square product; one multiply-add counts as two."""
  with tf.Graph().as_default(), tf.Session() as session:
    # A variable: a constant product would be folded away.
    factor = tf.Variable(tf.ones([_SIZE, _SIZE], dtype), use_resource=True)
    session.run(factor.initializer)
    product = session.make_callable(tf.matmul(factor, factor).op)
    product()
    times = []
    for _ in range(_REPEATS):
      start = time.perf_counter()
      product()
      times.append(time.perf_counter() - start)
  # The fastest: whatever else the machine does only slows a product down.
  return 2 * _SIZE**3 / min(times)
