# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The configuration of a session on this process's CPUs."""

import os

from palm_mtf._tf import tf

# TensorFlow's errors for a task that does not answer; calls that wait for it on
# other tasks are cancelled.
TASK_ERRORS = (
  tf.errors.UnavailableError,
  tf.errors.AbortedError,
  tf.errors.CancelledError,
)

# A pool of one thread runs the operations of several pods one after another, in
# the first step: a pod then finds in XLA's cache on disk what another has
# compiled, where all at once would compile all.
ONE_BY_ONE = tf.RunOptions(inter_op_thread_pool=1)


def session_config(num_devices: int, num_pods: int = 1) -> tf.ConfigProto:
  """Returns a configuration with virtual CPU devices.

  Args:
    num_devices: devices in the mesh of a pod.
    num_pods: pods in this process.
  """
  config = tf.ConfigProto(
    device_count={"CPU": num_devices * num_pods}, allow_soft_placement=True
  )
  if num_pods > 1:
    # As many threads share an operation's work as a pod would have cores for
    # itself: the same bits as from pods in processes.
    cores = len(os.sched_getaffinity(0))
    config.intra_op_parallelism_threads = max(1, cores // num_pods)
    # Pool 0 has a thread for each core, pool 1 is ONE_BY_ONE's.
    for num_threads in (0, 1):
      config.session_inter_op_thread_pool.add(num_threads=num_threads)
  # TensorFlow's graph rewriting is off. It adds numbers up in another order
  # where one of the sums on the way is fetched, which is so on one device but
  # not on its copies: they would drift apart in the last bit. XLA and oneDNN do
  # what it is for; without it a session starts sooner and needs less memory.
  config.graph_options.rewrite_options.disable_meta_optimizer = True
  return config
