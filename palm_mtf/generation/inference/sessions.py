# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sessions with a checkpoint's weights, for decoding or for the loss."""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.accounting.memory import step_threads
from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.checkpoints.variables import CheckpointProcesses, CheckpointReader
from palm_mtf.config import MeshLayout, ModelConfig, PodsConfig
from palm_mtf.data.batches.corpus import Batch
from palm_mtf.generation.decode.functions import DecodeFunction, LocalPrograms
from palm_mtf.generation.decode.weight_maker import build_decode_model
from palm_mtf.generation.decode.weights import DecodeSettings, LayerWeights
from palm_mtf.machine.accelerators import decodes_on_accelerators
from palm_mtf.machine.host_memory import free_garbage, release_file_pages
from palm_mtf.mesh.cpu_gpu import Devices
from palm_mtf.mesh.session import session_config
from palm_mtf.mesh.slices import Slice, variables_of
from palm_mtf.programs.forward_program import build_forward_program
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.client.connect import open_pod
from palm_mtf.runtime.processes import Process
from palm_mtf.runtime.program import Program, state_of

_logger = logging.getLogger(__name__)


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


def load_weights(
  client: Client,
  layers: Sequence[LayerWeights],
  restore: Callable[[Mapping[str, Sequence[Slice]]], None],
) -> None:
  """Makes the decoding weights of all layers from a checkpoint.

  `restore` takes {name of a checkpoint's variable: its slices on devices}, and
  reads the checkpoint's values into the slices.
  """
  # A checkpoint is float32, up to eight times as large as the weights, so keep
  # only one layer of the checkpoint in memory at a time.
  for i, layer in enumerate(layers):
    restore(layer.slices)
    client.call(Program(operations=[layer.prepare]))
    if i == 0:  # later layers hardly run the code read so far; free it
      release_file_pages()
  # Free host memory now, because the caller compiles the first program next,
  # which takes more memory than anything before.
  free_garbage()
  release_file_pages()


class LoadedDecoder(contextlib.AbstractContextManager):
  """Decoding weights on devices; as a context manager, frees them at the end.

  The mesh splits a batch into `num_slices` slices, so the number of rows in a
  batch must be a multiple of `num_slices`.
  """

  def __init__(
    self,
    checkpoint: Checkpoint,
    config: ModelConfig,
    mesh: MeshLayout,
    weight_dtype: str = "activation",
    *,
    pods: PodsConfig | None = None,
    for_steps: bool = False,
  ):
    # `for_steps`: whether decoding steps, rather than forward passes, will take
    # most of the time. Then the session gets only the threads that steps use.
    free_garbage()  # so that an earlier LoadedDecoder takes no memory
    self.config = config
    self.num_slices = mesh.axis_size_of("batch")
    pods = pods or PodsConfig()
    settings = DecodeSettings(
      model=config, mesh_layout=mesh, weight_dtype=weight_dtype
    )
    # If loading fails, `scope` closes the client, and the error names the
    # server that was lost, if any.
    with contextlib.ExitStack() as scope:
      if decodes_on_accelerators(mesh, pods):
        layers = self._open_accelerators(scope, settings, pods)
      else:
        layers = self._open_local(scope, settings, for_steps)
      with self._reader.open(checkpoint.prefix) as restore:
        load_weights(self.client, layers, lambda slices: restore([slices]))
      self._scope = scope.pop_all()

  def _open_local(
    self, scope: contextlib.ExitStack, settings: DecodeSettings, for_steps: bool
  ) -> Sequence[LayerWeights]:
    """Opens a session of this process; returns the weights to load."""
    given = settings.model, settings.mesh_layout, settings.weight_dtype
    _log_absence(settings.mesh_layout)
    graph = tf.Graph()
    with graph.as_default():
      model = build_decode_model(*given)
    session = session_config(settings.mesh_layout.num_devices)
    # A step is too small for many threads. C++ operations, which multiply by
    # packed weights, limit their threads themselves.
    if for_steps and not model.is_packed:
      session = step_session_config(*given)
    self.client = Client(tf.Session(graph=graph, config=session))
    scope.callback(self.client.close)
    self._reader = CheckpointReader(self.client)
    self._programs = LocalPrograms(model)
    return model.layers

  def _open_accelerators(
    self,
    scope: contextlib.ExitStack,
    settings: DecodeSettings,
    pods: PodsConfig,
  ) -> Sequence[LayerWeights]:
    """Opens a session with accelerators; returns the weights to load."""
    # This module imports JAX, which decoding on CPUs does not need.
    from palm_mtf.accelerators.decode_client import PodDecoder

    pod = open_pod(settings.mesh_layout, pods)
    self.client, devices = scope.enter_context(pod)
    self._reader = _make_reader(self.client, devices)
    self._programs = PodDecoder(settings, devices)
    with self.client.graph.as_default():
      return self._programs.make_layers()

  def build(self, function: DecodeFunction, state: str) -> Program:
    """Builds a program; those of one `state` share tensors, e.g. the cache."""
    with self.client.graph.as_default():
      return self._programs.build(function, state)

  def close(self) -> None:
    """Closes the client, and frees the weights."""
    self._scope.close()

  def __exit__(self, *error: object) -> None:
    self._scope.__exit__(*error)


def _log_absence(mesh: MeshLayout) -> None:
  if mesh.tpu:
    _logger.info(f'TPU = "{mesh.tpu}": absent here, so the CPUs compute')


def _make_reader(client: Client, devices: Devices) -> CheckpointReader:
  """Returns a reader that reads checkpoints in the client's own process."""
  # By default, TensorFlow may read on a server, whose host may lack the files.
  return CheckpointReader(client, CheckpointProcesses(Process(devices.client)))


def mean_loss(
  losses: Callable[[Batch], Iterable[tuple[float, float]]],
  batches: Iterable[Batch],
) -> float:
  """Returns -log p per target in nats: the weighted mean over all `batches`.

  `losses` returns (mean loss, sum of loss weights) for each part of a batch.
  """
  pairs = [pair for batch in batches for pair in losses(batch)]
  values, weights = zip(*pairs, strict=True)
  return float(np.average(values, weights=weights))


def compute_mean_loss(
  checkpoint: Checkpoint,
  model: ModelConfig,
  mesh: MeshLayout,
  batches: Sequence[Batch],
  pods: PodsConfig | None = None,
) -> float:
  """Returns a checkpoint's mean loss (nats per target) on batches of one shape.

  Memory holds only weights: no gradients and no optimizer slots.
  """
  build, pods = build_forward_program, pods or PodsConfig()
  with contextlib.ExitStack() as scope:
    if decodes_on_accelerators(mesh, pods):
      # This module imports JAX, which computing on CPUs does not need.
      from palm_mtf.accelerators.train_program import build_loss_program

      client, devices = scope.enter_context(open_pod(mesh, pods))
      reader = _make_reader(client, devices)
      build = functools.partial(build_loss_program, devices=devices)
    else:
      _log_absence(mesh)
      session = tf.Session(
        graph=tf.Graph(), config=session_config(mesh.num_devices)
      )
      client = scope.enter_context(Client(session))
      reader = CheckpointReader(client)
    with client.graph.as_default():
      program = build(
        model,
        mesh,
        batch_size=len(batches[0]["targets"]),
        features=list(batches[0]),
      )
    reader.restore([program.slices], checkpoint.prefix)
    loss_and_weight = Program(
      program.features,
      [program.loss, program.weight_sum],
      reads=state_of(variables_of([program.slices])),
    )
    return mean_loss(
      lambda batch: [client.call(loss_and_weight, batch)], batches
    )
