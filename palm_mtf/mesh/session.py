# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The configuration of a session on this process's CPUs."""

import os

from palm_mtf._tf import tf

ONE_BY_ONE = tf.RunOptions(inter_op_thread_pool=1)


def session_config(num_devices: int, num_pods: int = 1) -> tf.ConfigProto:
  """Returns a configuration with virtual CPU devices.

  The threads that share an operation's work are as many as the cores that a pod
  would have for itself, for the same bits as from pods in processes.

  TensorFlow's graph rewriting is off. It adds numbers up in another order where
  one of the sums on the way is fetched, which is so on one device but not on
  its copies: they would drift apart in the last bit. XLA and oneDNN do what it
  is for; without it a session starts sooner and needs less memory.

  Several pods have a second pool, of one thread, for the first step: it runs
  their operations one after another (`ONE_BY_ONE`). A pod then finds in XLA's
  cache on disk what another has compiled, where both at once would compile all.

  Args:
    num_devices: in the mesh of a pod.
    num_pods: in this process.
  """
  config = tf.ConfigProto(
    device_count={"CPU": num_devices * num_pods}, allow_soft_placement=True
  )
  if num_pods > 1:
    cores = len(os.sched_getaffinity(0))
    config.intra_op_parallelism_threads = max(1, cores // num_pods)
    for num_threads in (0, 1):  # 0: one for each core
      config.session_inter_op_thread_pool.add(num_threads=num_threads)
  config.graph_options.rewrite_options.disable_meta_optimizer = True
  return config
