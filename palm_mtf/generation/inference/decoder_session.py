# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Session with the weights of a checkpoint, for decoding and scoring."""

import os
from collections.abc import Callable, Mapping, Sequence

from palm_mtf._tf import tf
from palm_mtf.accounting.memory import step_threads
from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.checkpoints.variables import open_to_restore
from palm_mtf.config import MeshLayout, PalmConfig
from palm_mtf.generation.decode.generate_program import (
  DecodeModel,
  build_decode_model,
)
from palm_mtf.machine.host_memory import free_garbage, release_file_pages
from palm_mtf.mesh.session import session_config
from palm_mtf.mesh.slices import Slice


def step_session_config(
  config: PalmConfig, mesh: MeshLayout, weight_dtype: str
) -> tf.ConfigProto:
  """Returns the configuration of a session that runs decoding steps."""
  # One device has as many threads as a step is worth; several devices of a host
  # share all of them. A process keeps the threads of its first session.
  session = session_config(mesh.num_devices)
  if mesh.num_devices == 1:
    cores = len(os.sched_getaffinity(0))
    threads = step_threads(config, weight_dtype, cores)
    session.intra_op_parallelism_threads = threads
    session.inter_op_parallelism_threads = threads
  return session


def load_weights(
  session: tf.Session,
  model: DecodeModel,
  restore: Callable[[Mapping[str, Sequence[Slice]]], None],
) -> None:
  """Makes the weights of a model.

  Args:
    session: session of the model's graph.
    model: its weights.
    restore: assigns slices of variables, which it takes by checkpoint name.
  """
  # A checkpoint is float32, up to eight times as large as the weights: only one
  # layer of it is ever in memory.
  for i, layer in enumerate(model.layers):
    restore(layer.slices)
    session.run(layer.prepare)
    if i == 0:  # the other layers need less code than to build this took
      release_file_pages()
  # Compiling the first token's program, which comes next, takes most memory.
  free_garbage()
  release_file_pages()


class LoadedDecoder:
  """Weights in a session, as a context manager that closes it.

  Attributes:
    graph: graph that programs are built in.
    session: session that they run in.
    model: weights that they are built of.
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
    # `for_steps`: most of the time will go into steps, not into forward passes.
    free_garbage()  # such as the decoder of the sample before
    self.mesh = mesh
    self.graph = tf.Graph()
    with self.graph.as_default():
      self.model = build_decode_model(config, mesh, weight_dtype)
      # Products with packed weights have threads of their own.
      is_limited = for_steps and not self.model.weights.is_packed
      session = (
        step_session_config(config, mesh, weight_dtype)
        if is_limited
        else session_config(mesh.num_devices)
      )
      self.session = tf.Session(config=session)
      with open_to_restore(self.session, checkpoint.prefix) as restore:
        load_weights(self.session, self.model, lambda slices: restore([slices]))

  def __enter__(self) -> "LoadedDecoder":
    return self

  def __exit__(self, *unused: object) -> None:
    self.session.close()
