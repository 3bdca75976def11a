# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The session of a training loop: builds the graph and sets the variables."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from palm_mtf._tf import tf
from palm_mtf.checkpoints.manifest import Checkpoint, ReadCheckpoint
from palm_mtf.checkpoints.processes import (
  CheckpointProcesses,
  find_checkpoint_processes,
)
from palm_mtf.checkpoints.variables import (
  WeightsCopier,
  restore,
  restore_weights,
  whole_reader,
)
from palm_mtf.checkpoints.writer import remove_later
from palm_mtf.cluster.client.connect import Cluster, ServerMemory
from palm_mtf.cluster.client.heartbeat import Heartbeat
from palm_mtf.config.watch import Skips
from palm_mtf.data.batches.server_batches import (
  batches_spec,
  find_batches,
  read_batch,
)
from palm_mtf.mesh.processes import Process
from palm_mtf.model_dir.paths import ModelDir
from palm_mtf.programs.features import FEATURE_DTYPES, ServerFeatures
from palm_mtf.programs.train_program import TrainProgram, build_train_program
from palm_mtf.training.job import TrainJob
from palm_mtf.training.step import TrainStep
from palm_mtf.training.variable_checks import FiniteCheck, ReplicaCheck

_logger = logging.getLogger(__name__)


class WatchedSession(NamedTuple):
  """A session on a cluster's devices, and the heartbeat of the servers."""

  cluster: Cluster
  session: tf.Session
  heartbeat: Heartbeat


@dataclasses.dataclass(frozen=True)
class TrainSession:
  """A training program in a session that has set the program's variables.

  Attributes:
    program: the graph of a step, for one batch size.
    during: `Heartbeat.during`, which wraps every call into the session.
    copier: copies the weights for a checkpoint.
    read_whole: reads a checkpoint; raises an error if a file is damaged.
    memory: reads the memory use of the servers.
  """

  program: TrainProgram
  during: Callable[[str], AbstractContextManager[None]]
  train_step: TrainStep
  finite_check: FiniteCheck
  replica_check: ReplicaCheck
  copier: WeightsCopier
  read_whole: ReadCheckpoint
  memory: ServerMemory


def build_train_session(
  job: TrainJob,
  where: WatchedSession,
  skips: Skips,
  newest: Callable[[], Checkpoint | None],
) -> TrainSession:
  """Builds the graph of a training step, and sets the variables.

  Args:
    job: the run, after `job.step` steps.
    where: session of the current graph.
    skips: batches to skip.
    newest: returns the newest checkpoint or None, for error messages.

  Raises:
    PodLostError: a server is lost.
    DamagedCheckpointError: a file of the checkpoint is damaged.
  """
  cluster, session, heartbeat = where
  config, memory = job.config, ServerMemory(session, cluster.servers)
  # From here on `during` wraps every call into the session, so that a lost pod
  # raises a PodLostError that names the given phase.
  with heartbeat.during("while its servers were asked for batches"):
    heartbeat.connect(session)
    readers = cluster.servers
    if config.mesh_layout.steps_per_loop > 1:
      readers = []
    features = _find_features(session, readers, job, skips)
  program = build_train_program(
    config.model,
    config.mesh_layout,
    config.optimizer,
    batch_size=config.run.batch_sizes.size(job.step),
    seed=config.run.seed,
    features=features,
    pods=config.pods,
    devices=cluster.devices,
  )
  with heartbeat.during("while its variables were set"):
    train_step = TrainStep(session, program)
    pods = [x.slices for x in program.pods]
    processes = find_checkpoint_processes(
      session,
      Process(program.devices.client),
      cluster.servers,
      ModelDir(job.model_dir).checkpoints,
    )
    built = TrainSession(
      program,
      heartbeat.during,
      train_step,
      copier=WeightsCopier(session, pods, processes),
      finite_check=FiniteCheck(session, program, newest),
      replica_check=ReplicaCheck(session, program, newest),
      read_whole=whole_reader(session, processes),
      memory=memory,
    )
    _set_variables(job, session, built, processes)
  if job.rewinds:  # the weights from before the spike are restored
    remove_later(job.model_dir, job.step)
  return built


def _set_variables(
  job: TrainJob,
  session: tf.Session,
  built: TrainSession,
  processes: CheckpointProcesses,
) -> None:
  pods = [x.slices for x in built.program.pods]
  if job.checkpoint:
    if not job.checkpoint.is_verified:
      built.read_whole(job.checkpoint.path)
    restore(session, pods, job.checkpoint.prefix, processes)
    return
  if job.initial_state:
    # Read the files that `initial_weights` holds open, because the other run
    # may remove the checkpoint.
    files = job.initial_weights.prefix
    restore(session, pods, files, processes.client_only)
    return
  session.run(built.program.initialize)
  # From the initial weights take only parameters, no optimizer slots.
  if job.initial_weights:
    names = set(job.manifest.shapes)
    parameters = [
      {key: x for key, x in pod.items() if names.issuperset(x[0].names)}
      for pod in pods
    ]
    restore_weights(session, parameters, job.initial_weights, processes)


def _find_features(
  session: tf.Session, servers: Sequence[Process], job: TrainJob, skips: Skips
) -> Sequence[str] | ServerFeatures:
  """Returns the names of the features; as ServerFeatures if servers read them.

  Servers read the batches if there are servers and each has the client's
  tokens.
  """
  corpus, sizes = job.corpus, job.config.run.batch_sizes
  names = corpus.batches(sizes, skips).features
  if not servers:
    return names
  spec = batches_spec(corpus, sizes, skips)
  found = [x.call(find_batches, [spec], [tf.string])[0] for x in servers]
  for server, reason in zip(servers, session.run(found), strict=True):
    if reason:
      _logger.info(
        "the client reads the batches for all servers: "
        f"{server.device} does not ({reason.decode()})"
      )
      return names
  by_device = {server.device: server for server in servers}
  dtypes = [FEATURE_DTYPES[x] for x in names]

  def read(
    device: str, step: tf.Tensor, part: tf.Tensor, num_parts: int
  ) -> list[tf.Tensor]:
    inputs = [spec, step, part, num_parts]
    return by_device[device].call(read_batch, inputs, dtypes)

  return ServerFeatures(names, read)
