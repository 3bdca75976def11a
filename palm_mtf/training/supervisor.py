# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The supervisor of a run starts one training loop (loop.py) after another.

The next loop goes on from a checkpoint where the batch size changes, the loss
spikes, or a pod is lost.
"""

import contextlib
import dataclasses

from palm_mtf._tf import tf
from palm_mtf.checkpoints.manifest import (
  DamagedCheckpointError,
  Manifest,
  newest_whole,
  read_checkpoint,
  warn_of_damage,
)
from palm_mtf.checkpoints.writer import BackgroundWriter, quarantine_damaged
from palm_mtf.cluster.client.connect import Cluster, connect
from palm_mtf.cluster.client.heartbeat import Heartbeat, PodLostError
from palm_mtf.cluster.client.local_servers import PodServers
from palm_mtf.cluster.client.recovery import PodRecovery
from palm_mtf.cluster.server_info import check_bfloat16
from palm_mtf.config import PodsConfig
from palm_mtf.errors import UserError
from palm_mtf.machine.host_memory import free_garbage
from palm_mtf.machine.kernels import kernels_here, kernels_of
from palm_mtf.machine.stop_signals import StopRequest
from palm_mtf.model_dir.metrics import MetricsWriter
from palm_mtf.native.operations import operations_built_with
from palm_mtf.rates.measure import run_flops_per_sec
from palm_mtf.training.job import TrainJob, TrainOutcome
from palm_mtf.training.loop import TrainLoop, WatchedSession
from palm_mtf.training.progress import TrainProgress
from palm_mtf.training.watchdog import Watchdog


def run_training(job: TrainJob, servers: PodServers) -> TrainOutcome:
  """Trains a job to TRAIN_STEPS.

  Raises:
    UserError: a number is not finite, a checkpoint has no space, or a pod is
      lost and ON_POD_FAILURE does not recover it.
  """
  recovery = PodRecovery(
    servers, job.config.model, job.config.run.batch_sizes.sizes
  )
  while True:
    try:
      return _train_on(job, servers)
    except DamagedCheckpointError as error:
      # Found by the servers, which have read it.
      warn_of_damage(job.checkpoint.path, error)
      newest = newest_whole(job.model_dir)
      quarantine_damaged(job.model_dir, newest)
      job = dataclasses.replace(job, checkpoint=newest, rewinds=())
    except PodLostError as lost:
      # The thread that writes checkpoints has ended with its loop.
      newest = newest_whole(job.model_dir, read=read_checkpoint)
      job = dataclasses.replace(job, checkpoint=newest)
      config = job.config
      pods = recovery.pods_after(
        lost, config.pods, config.mesh_layout, job.step
      )
      job = dataclasses.replace(
        job,
        config=dataclasses.replace(config, pods=pods),
        rewinds=(),  # later than it: found again, as in a killed run
        manifest=_on(pods, job),
      )


def _on(pods: PodsConfig, job: TrainJob) -> Manifest:
  """Returns the manifest of a job on other pods."""
  settings = dict(job.manifest.settings)
  settings |= {"NUM_PODS": pods.num_pods, "ISLANDS": list(pods.islands)}
  return dataclasses.replace(job.manifest, settings=settings)


def _train_on(job: TrainJob, servers: PodServers) -> TrainOutcome:
  """Trains until the end, a signal, or the loss of a pod."""
  config, pods = job.config, job.config.pods
  places = servers.places()
  # Servers on one host share it, also where each has devices of its own.
  hosts = {place.address.partition(":")[0] for pod in places for place in pod}
  peak = run_flops_per_sec(config, max(1, len(hosts)))
  with Heartbeat(servers, places, pods.pod_timeout_secs) as heartbeat:
    if not config.mesh_layout.tpu:
      check_bfloat16(heartbeat.infos, config.model.activation_dtype)
    cluster = connect(pods, config.mesh_layout, places, heartbeat.infos)
    kernels = [x.kernels for x in heartbeat.infos.values()]
    here = [] if kernels else [kernels_here(operations_built_with())]
    job = job.computed_by(kernels_of(kernels or here))
    # One for all loops: a signal that comes between two is not forgotten.
    with StopRequest() as stop:
      while True:
        # After a rewind metrics, checkpoint writer and watchdog start anew.
        outcome = _run_to_rewind(job, cluster, heartbeat, peak, stop)
        if outcome.stopped_by or not outcome.rewinds:
          return outcome
        job = dataclasses.replace(
          job, checkpoint=outcome.checkpoint, rewinds=outcome.rewinds
        )


def _run_to_rewind(
  job: TrainJob,
  cluster: Cluster,
  heartbeat: Heartbeat,
  peak: float,
  stop: StopRequest,
) -> TrainOutcome:
  """Trains until the end, a signal, or a loss spike."""
  run, secs = job.config.run, job.config.fault_tolerance.watchdog_secs
  writer = BackgroundWriter(job.model_dir, run, job.checkpoint)
  with (
    contextlib.closing(MetricsWriter(job.model_dir, job.step)) as metrics,
    TrainProgress(job.step, run.train_steps) as progress,
    Watchdog(secs, lambda: writer.newest_path) as watchdog,
  ):
    while True:
      free_garbage()  # the program of the batch size, or the spike, before
      with (
        tf.Graph().as_default(),
        cluster.session() as session,
      ):
        watchdog.expect_slow()
        where = WatchedSession(cluster, session, heartbeat)
        records = (metrics, progress, writer, watchdog)
        try:
          outcome = TrainLoop(job, where, peak, *records).run(stop)
        except PodLostError as lost:
          if not stop.signal_name:
            raise
          # Whoever stops a run may have stopped its servers too.
          raise UserError(
            f"{lost}, after {stop.signal_name}; run the same command to go on."
          ) from None
      if (
        outcome.stopped_by
        or outcome.rewinds
        or outcome.validation_loss is not None
      ):
        return outcome
      # Another batch size is another program, which resumes from a checkpoint.
      job = dataclasses.replace(job, checkpoint=outcome.checkpoint)
