# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The number of threads with which sessions of this process decode."""

import os

from palm_mtf._tf import tf
from palm_mtf.accounting.memory import step_threads
from palm_mtf.config import MeshLayout, ModelConfig
from palm_mtf.mesh.session import session_config


def step_session_config(
  config: ModelConfig, mesh: MeshLayout, weight_dtype: str
) -> tf.ConfigProto:
  """Returns the configuration of a session that runs decoding steps."""
  # A single device gets only as many threads as a step can use. Several devices
  # share one thread per core. All sessions of a process share the threads of
  # the process's first session, so only that session's configuration counts.
  session = session_config(mesh.num_devices)
  if mesh.num_devices == 1:
    cores = len(os.sched_getaffinity(0))
    threads = step_threads(config, weight_dtype, cores)
    session.intra_op_parallelism_threads = threads
    session.inter_op_parallelism_threads = threads
  return session
