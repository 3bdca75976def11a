# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Peak FLOP/s of the chips, the denominator of MFU."""

import time
from collections.abc import Callable

from palm_mtf._tf import tf
from palm_mtf.accounting.hardware import MEASURED, peak_of_devices
from palm_mtf.config import Config
from palm_mtf.machine.gpu import gpu_capabilities
from palm_mtf.mesh.session import session_config
from palm_mtf.ops.bfloat16 import matmul

# CHIP = "measured": a CPU's data sheet gives no useful peak, so a product of
# matrices [size, size], large enough to reach it, is timed.
_SIZE = 1536
_REPEATS = 4


def run_flops_per_sec(config: Config, num_hosts: int = 1) -> float:
  """Returns the peak of all devices of a run together, FLOP/s.

  Args:
    config: settings: CHIP, the pods and their meshes.
    num_hosts: number of hosts that the devices are on.
  """
  num_pods = config.pods.num_pods
  num_devices = num_pods * config.mesh_layout.num_devices
  if config.run.chip != MEASURED:
    return peak_of_devices(config.run.chip, config.hardware, num_devices)
  dtype = tf.as_dtype(config.model.activation_dtype)
  if gpu_capabilities():  # a product runs on one of them
    return num_devices * measured_flops_per_sec(dtype)
  # Virtual devices of a CPU share it. Other hosts are taken to be as this one,
  # which multiplies for its share of the pods at once.
  pods_of_host = -(-num_pods // num_hosts)
  return num_hosts * measured_flops_per_sec(dtype, pods_of_host)


def measured_flops_per_sec(dtype: tf.DType, num_pods: int = 1) -> float:
  """Returns the FLOP/s of square products on this host, one a pod at once."""
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
