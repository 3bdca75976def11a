# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures this machine: FLOP/s of matrix products, bytes/s of memory.

`python -m palm_mtf.rates.measure` prints the rates as a JSON object, for
`palm_mtf doctor --measure`.
"""

import functools
import logging
import time
from collections.abc import Callable, Sequence

from palm_mtf._tf import tf
from palm_mtf.accounting.hardware import MEASURED, peak_of_devices
from palm_mtf.config import Config, MeshLayout, ModelConfig
from palm_mtf.console import configure_logging
from palm_mtf.json_text import json_text
from palm_mtf.machine.activation_dtype import is_slow
from palm_mtf.machine.processors import gpu_capabilities
from palm_mtf.mesh.session import session_config
from palm_mtf.ops.matmul import matmul
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.program import Program

_logger = logging.getLogger(__name__)

# The peak FLOP/s of a CPU is measured, because data sheets do not give the rate
# that products can reach. Products of square matrices of this size reach it.
PRODUCT_SIZE = 1536
PRODUCT_FLOPS = 2 * PRODUCT_SIZE**3  # a multiply-add counts as 2
_REPEATS = 4
_READ_BYTES = 2**28  # more than a cache holds, so that memory is read
# `warn_if_slow` times products of _TOKENS rows in bfloat16 and in float32, each
# _COMPARISONS times, and compares the fastest.
_TOKENS, _COMPARISONS = 1024, 5


def run_flops_per_sec(config: Config, num_hosts: int = 1) -> float:
  """Returns the FLOP/s at which the MFU of a run on `num_hosts` is 100%."""
  num_pods = config.pods.num_pods
  num_devices = num_pods * config.mesh_layout.pod_devices
  if config.run.chip != MEASURED:
    return peak_of_devices(config.run.chip, config.hardware, num_devices)
  dtype = tf.as_dtype(config.model.activation_dtype)
  if gpu_capabilities():  # only one GPU is measured, so count all GPUs
    return num_devices * measured_flops_per_sec(dtype)
  # Virtual devices share a CPU, so the products of this host's pods run at the
  # same time. Other hosts are assumed to be as fast as this host.
  pods_of_host = -(-num_pods // num_hosts)
  return num_hosts * measured_flops_per_sec(dtype, pods_of_host)


def measured_flops_per_sec(dtype: tf.DType, num_pods: int = 1) -> float:
  """Returns this host's FLOP/s while `num_pods` matrix products run at once."""
  # TensorFlow sizes a process's thread pool at its first session, which may be
  # this one. So give this session the threads that later sessions need.
  config = session_config(1, num_pods)
  with tf.Graph().as_default(), Client(tf.Session(config=config)) as client:
    factor = make_variable(client, [PRODUCT_SIZE, PRODUCT_SIZE], dtype)
    products = [matmul(factor, factor).op for _ in range(num_pods)]
    product = caller(client, tf.group(products))
    return PRODUCT_FLOPS * num_pods / _fastest_secs(product)


def read_bytes_per_sec() -> float:
  """Returns the memory bandwidth of all cores together, bytes/s."""
  config = session_config(1)
  with tf.Graph().as_default(), Client(tf.Session(config=config)) as client:
    array = make_variable(client, [_READ_BYTES // 4], tf.float32)
    read = caller(client, tf.reduce_max(array).op)
    return _READ_BYTES / _fastest_secs(read)


def make_variable(
  client: Client, shape: Sequence[int], dtype: tf.DType
) -> tf.Variable:
  """Returns a variable of ones; a constant's product would run only once."""
  variable = tf.Variable(tf.ones(shape, dtype), use_resource=True)
  client.call(Program(operations=[variable.initializer]))
  return variable


def caller(client: Client, operation: tf.Operation) -> Callable[[], object]:
  """Returns a function that runs an operation of the client's graph."""
  return functools.partial(client.call, Program(operations=[operation]))


def seconds_of(call: Callable[[], object]) -> float:
  """Returns the seconds that a call takes."""
  start = time.perf_counter()
  call()
  return time.perf_counter() - start


def _fastest_secs(call: Callable[[], object]) -> float:
  # The fastest call counts, because other programs only slow calls down.
  call()  # not timed, because the first call prepares the operations
  return min(seconds_of(call) for _ in range(_REPEATS))


def warn_if_slow(
  model: ModelConfig, mesh: MeshLayout, config: tf.ConfigProto | None = None
) -> None:
  """Warns if a model multiplies in bfloat16 and this machine emulates bfloat16.

  `config` must be the configuration of later sessions too, because TensorFlow
  sizes a process's thread pool at its first session, which may be the session
  here. None means the configuration that has a thread per core.
  """
  if not is_slow(model, mesh):
    return
  config = config or session_config(mesh.num_devices)
  with tf.Graph().as_default(), Client(tf.Session(config=config)) as client:
    products = []
    for dtype in (tf.bfloat16, tf.float32):
      x = make_variable(client, [_TOKENS, model.d_model], dtype)
      w = make_variable(client, [model.d_model, model.d_ff], dtype)
      products.append(caller(client, matmul(x, w).op))
    # The first calls prepare the operations, so their times are dropped.
    _, *times = ([*map(seconds_of, products)] for _ in range(_COMPARISONS + 1))
  bfloat16, float32 = map(min, zip(*times, strict=True))
  _logger.warning(
    'ACTIVATION_DTYPE = "bfloat16": this machine computes it in float32 and '
    f"rounds, which takes {bfloat16 / float32:.1f} times as long as float32 "
    '(measured, a product of the MLP); "auto" or "float32" avoids that'
  )


def describe_rates() -> dict[str, str]:
  """Returns {name: value with unit} of this machine's rates, for printing."""
  texts = {}
  for dtype in ("float32", "bfloat16"):
    rate = measured_flops_per_sec(tf.as_dtype(dtype))
    texts[f"{dtype} products"] = f"{rate / 1e9:,.0f} GFLOP/s"
  return {**texts, "memory read": f"{read_bytes_per_sec() / 1e9:,.1f} GB/s"}


if __name__ == "__main__":
  configure_logging()
  print(json_text(describe_rates()))
