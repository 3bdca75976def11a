# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Peak FLOP/s of the chips, the denominator of MFU."""

import time
from collections.abc import Callable

from palm_mtf._tf import tf
from palm_mtf.accounting.hardware import peak_flops_per_sec
from palm_mtf.mesh.session import session_config
from palm_mtf.ops.bfloat16 import matmul

# CHIP = "measured": a CPU's data sheet gives no useful peak, so a product of
# matrices [size, size], large enough to reach it, is timed.
_SIZE = 1536
_REPEATS = 4


def chip_flops_per_sec(
  chip: str, activation_dtype: str, num_pods: int = 1
) -> float:
  """Returns the peak of CHIP, FLOP/s.

  Args:
    chip: CHIP.
    activation_dtype: dtype of the products.
    num_pods: number of pods that share this machine.
  """
  if chip != "measured":
    return float(peak_flops_per_sec(chip))
  return _measure_product(tf.as_dtype(activation_dtype), num_pods)


def _measure_product(dtype: tf.DType, num_pods: int) -> float:
  """Returns the FLOP/s of a product for each pod, all of them at once."""
  # TensorFlow keeps the number of threads of a process's first session.
  config = session_config(1, num_pods)
  with tf.Graph().as_default(), tf.Session(config=config) as session:
    # A variable: a constant product would be folded away.
    factor = tf.Variable(tf.ones([_SIZE, _SIZE], dtype), use_resource=True)
    session.run(factor.initializer)
    products = [matmul(factor, factor).op for _ in range(num_pods)]
    product = session.make_callable(tf.group(products))
    # A multiply-add counts as 2.
    return 2 * _SIZE**3 * num_pods / fastest_call_secs(product)


def fastest_call_secs(call: Callable[[], object]) -> float:
  """Returns the least seconds of a few calls."""
  # Other programs only slow a call down. The first one makes its kernels.
  call()
  times = []
  for _ in range(_REPEATS):
    start = time.perf_counter()
    call()
    times.append(time.perf_counter() - start)
  return min(times)
