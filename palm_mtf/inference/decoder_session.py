# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The weights of a checkpoint in a session, as decoding reads them.

generator.py continues texts with them, scorer.py says how likely texts are;
both may use the same ones.
"""

import os

from palm_mtf._tf import tf
from palm_mtf.accounting.decode import step_threads
from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.checkpoints.tensors import restore
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import PalmConfig
from palm_mtf.mesh.session import session_config
from palm_mtf.programs.generate_program import build_decode_model


def step_session_config(
  config: PalmConfig, mesh: MeshLayout, weight_dtype: str
) -> tf.ConfigProto:
  """Returns a session's configuration for many tokens one after another.

  One device has as many threads as pay for a step; a process keeps those of its
  first session. Several devices of a host share all of them.
  """
  session = session_config(mesh.num_devices)
  if mesh.num_devices == 1:
    cores = len(os.sched_getaffinity(0))
    threads = step_threads(config, weight_dtype, cores)
    session.intra_op_parallelism_threads = threads
    session.inter_op_parallelism_threads = threads
  return session


class LoadedDecoder:
  """Use it as a context manager: it holds a session.

  Attributes:
    graph: where programs are built.
    session: where they run.
    model: what they are built of.
    mesh: devices and layout rules.
  """

  def __init__(
    self,
    checkpoint: Checkpoint,
    config: PalmConfig,
    mesh: MeshLayout,
    weight_dtype: str = "activation",
    *,
    for_steps: bool = False,
  ):
    """Restores the weights.

    Args:
      checkpoint: the weights.
      config: the architecture.
      mesh: devices and layout rules.
      weight_dtype: WEIGHT_DTYPE.
      for_steps: whether most of the time will go into continuing texts, not
        into reading them.
    """
    self.mesh = mesh
    self.graph = tf.Graph()
    with self.graph.as_default():
      self.model = build_decode_model(config, mesh, weight_dtype)
      session = (
        step_session_config(config, mesh, weight_dtype)
        if for_steps
        else session_config(mesh.num_devices)
      )
      self.session = tf.Session(config=session)
      restore(self.session, [self.model.slices], checkpoint.prefix)
      self.session.run(self.model.prepare)
      self.session.run(self.model.release)

  def __enter__(self) -> "LoadedDecoder":
    return self

  def __exit__(self, *unused: object) -> None:
    self.session.close()
