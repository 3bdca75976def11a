# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A whole run: one training loop (train_loop.py) after another.

A loop ends, and the next goes on from a checkpoint, where the batch size
changes, where the loss spikes, and where a pod is lost.
"""

import contextlib
import dataclasses

from palm_mtf._tf import tf
from palm_mtf.checkpoint_writer import BackgroundWriter
from palm_mtf.checkpoints import Manifest, newest_whole
from palm_mtf.cluster import Cluster, connect
from palm_mtf.errors import UserError
from palm_mtf.metrics import MetricsWriter
from palm_mtf.peak import chip_flops_per_sec
from palm_mtf.pod_recovery import PodRecovery
from palm_mtf.pod_servers import PodServers
from palm_mtf.pod_watch import PodLostError, PodWatch
from palm_mtf.pods_config import PodsConfig
from palm_mtf.progress import TrainProgress
from palm_mtf.stopping import StopRequest
from palm_mtf.train_loop import Outcome, Place, TrainJob, TrainLoop
from palm_mtf.watchdog import Watchdog


def run_training(job: TrainJob, servers: PodServers) -> Outcome:
  """Trains from `job.checkpoint`, or from nothing, to `job.run.train_steps`.

  Args:
    job: what is trained.
    servers: of its pods.

  Raises:
    UserError: a number is no longer finite, a checkpoint has no space, or a
      pod is lost and ON_POD_FAILURE does not make up for it.
  """
  recovery = PodRecovery(servers, job.model, job.run.batch_sizes.sizes)
  while True:
    try:
      return _train_on(job, servers)
    except PodLostError as lost:
      newest = newest_whole(job.model_dir)
      step = newest.manifest.step if newest else 0
      pods = recovery.pods_after(lost, job.pods, job.mesh, step)
      job = dataclasses.replace(
        job, pods=pods, checkpoint=newest, rewinds=(), manifest=_on(pods, job)
      )


def _on(pods: PodsConfig, job: TrainJob) -> Manifest:
  """Returns a job's manifest with settings of pods."""
  settings = dict(job.manifest.settings)
  settings |= {"NUM_PODS": pods.num_pods, "ISLANDS": list(pods.islands)}
  return dataclasses.replace(job.manifest, settings=settings)


def _train_on(job: TrainJob, servers: PodServers) -> Outcome:
  """Trains to the end, or a signal, on all servers."""
  peak = chip_flops_per_sec(
    job.run.chip, job.model.activation_dtype, job.pods.num_pods
  )
  places = servers.places()
  with PodWatch(servers, places, job.pods.pod_timeout_secs) as pod_watch:
    cluster = connect(job.pods, job.mesh, places)
    while True:  # through all rewinds
      outcome = _run_to_rewind(job, cluster, pod_watch, peak)
      if not outcome.rewinds:
        return outcome
      job = dataclasses.replace(
        job, checkpoint=outcome.checkpoint, rewinds=outcome.rewinds
      )


def _run_to_rewind(
  job: TrainJob, cluster: Cluster, pod_watch: PodWatch, peak: float
) -> Outcome:
  """Trains to the end, a signal, or a spike; records start anew after one."""
  step = job.checkpoint.manifest.step if job.checkpoint else 0
  with (
    StopRequest() as stop,
    contextlib.closing(MetricsWriter(job.model_dir, step)) as metrics,
    TrainProgress(step, job.run.train_steps) as progress,
    BackgroundWriter(job.model_dir, job.run, job.checkpoint) as writer,
    Watchdog(job.watch.watchdog_secs, lambda: writer.newest_path) as watchdog,
  ):
    while True:
      with (
        tf.Graph().as_default(),
        cluster.session() as session,
      ):
        watchdog.expect_slow()
        where = Place(cluster.devices, session, pod_watch)
        records = (metrics, progress, writer, watchdog)
        try:
          outcome = TrainLoop(job, where, peak, *records).run(stop)
        except PodLostError as lost:
          if not stop.signal_name:
            raise
          # Who asks a run to stop may have stopped its servers too.
          raise UserError(
            f"{lost}, after {stop.signal_name}; run the same command to go on."
          ) from None
      if (
        outcome.stopped_by
        or outcome.rewinds
        or outcome.validation_loss is not None
      ):
        return outcome
      # Another batch size is another program, and goes on as a resumed run.
      job = dataclasses.replace(job, checkpoint=outcome.checkpoint)
