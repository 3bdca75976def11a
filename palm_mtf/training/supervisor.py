# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs one training loop (loop.py) after another until the run ends.

An event ends each loop, and determines what the next loop makes again:

  Spike                    metrics, progress, checkpoint writer, watchdog
  Moved                    also the session and connections, to other servers
  PodLostError             the same, to the pods selected below
  DamagedCheckpointError   the same, from an older checkpoint
  Finished, Stopped        nothing: the run ends

After a run has lost a pod, it continues from the newest checkpoint with the
pods that ON_POD_FAILURE selects:

  stop     none: the same command resumes the run later
  wait     the same pods, after the lost pod answers
  shrink   the other pods, which then share each batch
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from palm_mtf.checkpoints.manifest import (
  DamagedCheckpointError,
  newest_whole,
  read_checkpoint,
  warn_of_damage,
)
from palm_mtf.checkpoints.writer import BackgroundWriter, quarantine_damaged
from palm_mtf.config import MeshLayout, ModelConfig, PodsConfig, mesh_layout
from palm_mtf.errors import UserError
from palm_mtf.executors.choose import executor_of
from palm_mtf.executors.executor import Executor
from palm_mtf.machine.host_memory import free_garbage
from palm_mtf.machine.process import StopRequest
from palm_mtf.machine.processors import kernels_here, kernels_of
from palm_mtf.model_dir.metrics import MetricsWriter
from palm_mtf.native.operations import operations_built_with
from palm_mtf.rates.measure import run_flops_per_sec
from palm_mtf.runtime.client.connect import Cluster, connect
from palm_mtf.runtime.client.heartbeat import Heartbeat, PodLostError
from palm_mtf.runtime.client.local_servers import PodServers
from palm_mtf.training.job import Finished, Moved, Spike, Stopped, TrainJob
from palm_mtf.training.loop import Event, Records, TrainLoop
from palm_mtf.training.loss_spikes import SpikePolicy
from palm_mtf.training.progress import TrainProgress, Watchdog
from palm_mtf.training.session import TrainSession

_logger = logging.getLogger(__name__)

_PAUSE_SECS = 1.0  # between attempts to reach a lost pod
# With ON_POD_FAILURE = "wait", a run ends if it loses pods more often than this
# between two checkpoints, because it makes no progress then.
_MAX_LOSSES = 3


class PodRecovery:
  """Decides with which pods a run continues after the loss of a pod."""

  def __init__(
    self,
    servers: PodServers,
    executor: Executor,
    model: ModelConfig,
    batch_sizes: Sequence[int],
  ):
    # Model and batch sizes are kept to check that they work with fewer pods.
    self._servers, self._model, self._batch_sizes = servers, model, batch_sizes
    self._executor = executor
    self._step, self._num_losses = -1, 0
    self._had_all_pods = False

  def pods_after(
    self, lost: PodLostError, pods: PodsConfig, mesh: MeshLayout, step: int
  ) -> PodsConfig:
    """Returns the settings of the pods to continue with.

    If ON_POD_FAILURE is "wait", waits until all servers answer. `step` is the
    step of the newest checkpoint, 0 if there is none.

    Raises UserError if the run cannot continue.
    """
    # Drop no pod until all pods have answered once: a pod that is missing at
    # the start is a mistake in the settings, or is not started yet.
    self._had_all_pods = self._had_all_pods or not lost.is_missing
    policy = pods.on_pod_failure
    if not self._had_all_pods and policy != "wait":
      advice = "run the same command to start it again"
      if pods.pods == "cluster":
        advice = (
          "start it with `palm_mtf pods serve`, or correct ISLANDS; "
          'ON_POD_FAILURE = "wait" would wait for it'
        )
      raise UserError(f"{lost}; {advice}.") from None
    if policy == "stop":
      raise UserError(f"{lost}; run the same command to resume.") from None
    _logger.warning(f"{lost}; ON_POD_FAILURE = {policy!r}")
    if policy == "shrink":
      pods = self._shrink(lost, pods, mesh)
    else:
      self._count_loss(lost, step)
      self._wait(lost, pods)
    _logger.info(f"continuing from step {step} on {pods.num_pods} pods")
    return pods

  def _shrink(
    self, lost: PodLostError, pods: PodsConfig, mesh: MeshLayout
  ) -> PodsConfig:
    num_pods = pods.num_pods - 1
    if not num_pods:
      raise UserError(f"{lost}; no pod is left to shrink to.") from None
    try:
      mesh_layout.check_layout(
        mesh, self._model, *self._batch_sizes, num_pods=num_pods
      )
    except UserError as error:
      raise UserError(
        f"{lost}; the run cannot shrink to {num_pods} pods: {error}"
      ) from None
    return self._servers.remove(lost.pod)

  def _count_loss(self, lost: PodLostError, step: int) -> None:
    """Raises UserError if pods are lost too often without a new checkpoint."""
    if step != self._step:
      self._step, self._num_losses = step, 0
    self._num_losses += 1
    if self._num_losses > _MAX_LOSSES:
      raise UserError(
        f"{lost}; a pod was lost {self._num_losses} times since step {step} "
        "was saved; save more often (CHECKPOINT_STEPS), or repair that pod, "
        "and run the same command to resume."
      ) from None

  def _wait(self, lost: PodLostError, pods: PodsConfig) -> None:
    end = time.monotonic() + pods.pod_wait_secs
    while True:
      self._servers.restart(lost.pod)
      try:
        # Ask every server once. A UserError other than a PodLostError means
        # that a server cannot be used, and ends the run.
        places = self._executor.find_places(self._servers.places())
        secs = pods.pod_timeout_secs
        Heartbeat(self._servers, places, secs).check_links()
        return
      except PodLostError as error:
        lost = error  # restart this pod next, perhaps another one
      if time.monotonic() > end:
        raise UserError(
          f"{lost}; the run waited for {pods.pod_wait_secs:g} seconds "
          "(POD_WAIT_SECS); run the same command to resume."
        ) from None
      time.sleep(_PAUSE_SECS)


class Pods(NamedTuple):
  """Connected pods, and what a run knows of them."""

  cluster: Cluster
  heartbeat: Heartbeat
  peak: float  # FLOP/s of all devices together, for MFU
  kernels: Mapping[str, str]  # versions etc. that decide rounding, by name
  # One object for all loops, so that a signal between two loops is not lost.
  stop: StopRequest
  must_move: Callable[[], bool]  # whether a manager gives the run other servers


class _Scope(contextlib.ExitStack):
  """Keeps a context manager open from one loop to the next."""

  # What the open context manager has yielded; None if none is open.
  value: Any = None

  def open(self, manager: contextlib.AbstractContextManager) -> None:
    self.value = self.enter_context(manager)

  def close(self, event: object = None) -> None:
    """Leaves the open manager, if any, because of `event`, perhaps an error."""
    self.value = None
    error = event if isinstance(event, Exception) else None
    self.__exit__(type(error) if error else None, error, None)


def run_training(job: TrainJob, servers: PodServers) -> Finished | Stopped:
  """Trains a job until TRAIN_STEPS or a stop signal.

  Raises UserError if a loss, gradient or variable is not finite, the disk has
  no space for a checkpoint, or a pod is lost and ON_POD_FAILURE ends the run.
  """
  config = job.config
  executor, sizes = executor_of(config.mesh_layout), config.run.batch_sizes
  recovery = PodRecovery(servers, executor, config.model, sizes.sizes)
  with _Scope() as pods, _Scope() as session, _Scope() as records:
    while True:
      try:
        if not pods.value:
          pods.open(connect_pods(job, servers))
          job = job.record_kernels(pods.value.kernels)
        if not records.value:
          records.open(open_records(job))
        event = _run_loop(job, pods.value, session, records)
      except (PodLostError, DamagedCheckpointError) as error:
        event = error
      if isinstance(event, Finished | Stopped):
        return event
      records.close()
      if not isinstance(event, Spike):
        session.close(event)
        pods.close()
      match event:
        case Spike() | Moved():
          job = dataclasses.replace(
            job, checkpoint=event.checkpoint, rewinds=event.rewinds
          )
        case PodLostError():
          job = _continue_without_lost_pod(job, event, recovery)
        case DamagedCheckpointError():
          # A server found damage in this checkpoint: resume from an older one.
          warn_of_damage(job.checkpoint.path, event)
          newest = newest_whole(job.model_dir)
          quarantine_damaged(job.model_dir, newest)
          job = dataclasses.replace(job, checkpoint=newest, rewinds=())
      # The traceback of an error would keep the graph of the loop in memory.
      del event


@contextlib.contextmanager
def connect_pods(job: TrainJob, servers: PodServers) -> Iterator[Pods]:
  """Connects to all pods; yields them once all have answered."""
  config, pods = job.config, job.config.pods
  executor = executor_of(config.mesh_layout)
  places = executor.find_places(servers.places())
  # On CPUs, the measured peak FLOP/s grows with the number of hosts, not of
  # servers, because all servers on a host share that host's CPU.
  hosts = {place.address.partition(":")[0] for pod in places for place in pod}
  peak = run_flops_per_sec(config, max(1, len(hosts)))
  secs = pods.pod_timeout_secs
  with Heartbeat(servers, places, secs, executor) as heartbeat:
    infos = heartbeat.infos
    executor.check_servers(infos, config.model.activation_dtype)
    cluster = connect(
      executor, pods, config.mesh_layout, places, infos, servers.stream
    )
    kernels = [x.kernels for x in heartbeat.infos.values()]
    kernels = kernels or [kernels_here(operations_built_with())]
    with StopRequest() as stop:
      yield Pods(
        cluster, heartbeat, peak, kernels_of(kernels), stop, servers.must_move
      )


@contextlib.contextmanager
def open_records(job: TrainJob) -> Iterator[Records]:
  """Opens what records the run from `job.step` on."""
  run, secs = job.config.run, job.config.fault_tolerance.watchdog_secs
  writer = BackgroundWriter(job.model_dir, run, job.checkpoint)
  with (
    contextlib.closing(MetricsWriter(job.model_dir, job.step)) as metrics,
    TrainProgress(job.step, run.train_steps) as progress,
    Watchdog(secs, lambda: writer.newest_path) as watchdog,
  ):
    yield Records(metrics, progress, writer, watchdog)


def _run_loop(
  job: TrainJob, pods: Pods, session: _Scope, records: _Scope
) -> Event:
  """Runs a training loop; returns the event that ended it.

  `session` keeps its TrainSession from the previous loop, or gets a new one.
  """
  free_garbage()  # frees the memory of the previous loop's graph
  spikes = SpikePolicy(job.config.fault_tolerance, job.start, job.rewinds)
  records.value.watchdog.expect_slow()
  try:
    if not session.value:
      reserved = job.config.pods.device_bytes or 0
      client = session.enter_context(pods.cluster.client(reserved))
      session.value = TrainSession(
        job,
        client,
        pods.cluster,
        pods.heartbeat,
        newest=lambda: records.value.writer.wait(),
      )
    session.value.set_variables(job)
    loop = TrainLoop(
      job, session.value, spikes, records.value, pods.peak, pods.must_move
    )
    return loop.run(pods.stop)
  except PodLostError as lost:
    if not pods.stop.signal_name:
      raise
    # The signal may have stopped the servers too, so do not wait for them.
    raise UserError(
      f"{lost}, after {pods.stop.signal_name}; run the same command to resume."
    ) from None


def _continue_without_lost_pod(
  job: TrainJob, lost: PodLostError, recovery: PodRecovery
) -> TrainJob:
  """Returns the job that continues on the pods that ON_POD_FAILURE selects."""
  # The loop's writer has ended, so no newer checkpoint can still appear.
  newest = newest_whole(job.model_dir, read=read_checkpoint)
  job = dataclasses.replace(job, checkpoint=newest)
  config = job.config
  pods = recovery.pods_after(lost, config.pods, config.mesh_layout, job.step)
  settings = dict(job.manifest.settings)
  islands = pods.islands if pods.is_managed else list(pods.islands)
  settings |= {"NUM_PODS": pods.num_pods, "ISLANDS": islands}
  return dataclasses.replace(
    job,
    config=dataclasses.replace(config, pods=pods),
    rewinds=(),  # spikes after the checkpoint will be detected again
    manifest=dataclasses.replace(job.manifest, settings=settings),
  )
