# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The configuration of a session on this process's CPUs."""

import os

from palm_mtf._tf import tf
from palm_mtf.machine.compiled_code import check_xla_flags

# TensorFlow's errors that mean a lost server. CancelledError ends the calls on
# other servers that wait for the lost server.
SERVER_ERRORS = (
  tf.errors.UnavailableError,
  tf.errors.AbortedError,
  tf.errors.CancelledError,
)

# The first step runs on a pool of one thread, so that pods compile one after
# another. Otherwise all pods would compile the same code at the same time,
# instead of finding each other's code in XLA's cache.
ONE_BY_ONE = tf.RunOptions(inter_op_thread_pool=1)


def session_config(num_devices: int, num_pods: int = 1) -> tf.ConfigProto:
  """Returns a configuration with virtual CPU devices for this process's pods.

  `num_devices` is the number of devices per pod.

  Raises UserError if TF_XLA_FLAGS cannot work with so many devices.
  """
  check_xla_flags(num_devices * num_pods)
  config = tf.ConfigProto(
    device_count={"CPU": num_devices * num_pods}, allow_soft_placement=True
  )
  if num_pods > 1:
    # Give each operation as many threads as in pods with server processes, so
    # that results have the same bits with and without servers.
    cores = len(os.sched_getaffinity(0))
    config.intra_op_parallelism_threads = max(1, cores // num_pods)
    # Pool 0 has a thread per core; pool 1 has one thread, for the first step.
    for num_threads in (0, 1):
      config.session_inter_op_thread_pool.add(num_threads=num_threads)
  # TensorFlow's graph rewriting is off, because it changes the order of a sum
  # whose intermediate result is fetched. If several devices compute this sum,
  # the result is fetched from only one of them, so the devices would differ in
  # the last bit. Without rewriting, a session also starts sooner and takes less
  # memory. XLA and oneDNN still optimize.
  config.graph_options.rewrite_options.disable_meta_optimizer = True
  return config
