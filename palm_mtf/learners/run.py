# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The client of a run of learners: merges their work, validates and saves."""

import contextlib
import dataclasses
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.architecture.parameters import saved_shapes
from palm_mtf.checkpoints.manifest import newest_whole
from palm_mtf.checkpoints.variables import write_arrays
from palm_mtf.checkpoints.writer import remove_later
from palm_mtf.config import (
  Config,
  ExchangeConfig,
  LearnersConfig,
  MeshLayout,
  PodsConfig,
)
from palm_mtf.config.macros import values_of
from palm_mtf.config.optimizer import SgdConfig
from palm_mtf.errors import UserError
from palm_mtf.executors.choose import decodes_on_accelerators
from palm_mtf.generation.inference.sessions import mean_losses
from palm_mtf.json_text import json_text
from palm_mtf.learners.audit import Audits
from palm_mtf.learners.client import LearnerClient
from palm_mtf.learners.decoupled import DecoupledHandler, list_fragments
from palm_mtf.learners.learner import PodArrays
from palm_mtf.learners.members import Members
from palm_mtf.learners.protocol import Check, Message
from palm_mtf.learners.record import Record, replay
from palm_mtf.learners.rounds import AUDITOR, Rounds
from palm_mtf.learners.service import serve
from palm_mtf.learners.syncer import Arrays, OuterParameters, Syncer
from palm_mtf.learners.volunteer import describe_kernels, take_part
from palm_mtf.machine.host_memory import resident_bytes
from palm_mtf.model_dir.json_lines import read_json_lines
from palm_mtf.model_dir.paths import ModelDir
from palm_mtf.programs.step_programs import VALIDATED
from palm_mtf.runtime.addresses import resolve, split_address
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.client.local_servers import PodServers
from palm_mtf.training.job import Finished, Stopped, TrainJob
from palm_mtf.training.loop import Records
from palm_mtf.training.session import TrainSession
from palm_mtf.training.supervisor import Pods, connect_pods, open_records

_logger = logging.getLogger(__name__)

_MOMENTUM = "outer_momentum"  # name of a slot, as in checkpoints of pods
_STATE = "learners"  # key of `Syncer.state` in a manifest's `data`
_TICK_SECS, _END_SECS = 0.2, 5.0


def _on_client(config: Config) -> Config:
  """Returns settings with which the client holds the weights of one pod."""
  optimizer = {
    x.name: getattr(config.optimizer, x.name)
    for x in dataclasses.fields(SgdConfig)
    if x.name != "optimizer"
  }
  mesh, pods = config.mesh_layout, PodsConfig()
  if mesh.tpu and not decodes_on_accelerators(mesh, pods):
    _logger.info(f'TPU = "{mesh.tpu}": absent here, so the CPUs validate')
    mesh = MeshLayout(mesh_shape="", layout="")
  return dataclasses.replace(
    config,
    mesh_layout=mesh,
    pods=pods,
    exchange=ExchangeConfig(),
    optimizer=SgdConfig(**optimizer),  # without slots
  )


def _read_outer(job: TrainJob, parameters: Arrays) -> OuterParameters:
  """Returns the outer parameters, with the momentum of the checkpoint."""
  config, momentum, state = job.config, {}, _state_of(job)
  if job.checkpoint:
    reader = tf.train.load_checkpoint(job.checkpoint.prefix)
    for name in parameters:
      slot = f"{name}/{_MOMENTUM}"
      if reader.has_tensor(slot):
        momentum[name] = reader.get_tensor(slot)
  return OuterParameters(
    parameters,
    list_fragments(config.model, config.run.frozen, config.exchange.fragments),
    config.exchange,
    momentum,
    state.get("merges", 0),
  )


def _state_of(job: TrainJob) -> dict[str, Any]:
  if not job.checkpoint:
    return {}
  # A checkpoint of pods counts no tasks: all tasks of its steps are done.
  tasks = job.step // job.config.exchange.period * job.config.pods.num_pods
  found = job.checkpoint.manifest.data.get(_STATE)
  if found is None:
    return {"next_task": tasks}
  assert isinstance(found, Mapping)
  now, before = values_of(job.config), job.checkpoint.manifest.settings
  for macro in ("NUM_PODS", "OUTER_STEPS", "FRAGMENTS", "GLOBAL_BATCH_SIZE"):
    if macro in before and json_text(now[macro]) != json_text(before[macro]):
      raise UserError(
        f"{macro} = {now[macro]}: {job.checkpoint.path} counts tasks with "
        f"{before[macro]}; keep that value, or name it in INIT_CHECKPOINT of "
        "another MODEL_DIR."
      )
  return {**found}


def _make_handler(
  job: TrainJob, outer: OuterParameters, audits: Audits | None, **more: Any
) -> DecoupledHandler:
  config, pods, own = job.config, job.config.pods, job.config.learners
  num_tasks = config.run.train_steps // config.exchange.period * pods.num_pods
  syncer: Syncer | Rounds
  if audits:
    syncer = Rounds(
      outer,
      audits,
      own,
      num_tasks=num_tasks,
      num_shares=pods.num_pods,
      kernels=describe_kernels(),
      **more,
    )
  else:
    syncer = Syncer(
      outer,
      num_tasks=num_tasks,
      quorum=own.quorum or pods.num_pods,
      grace_secs=own.grace_secs,
      lost_secs=pods.pod_timeout_secs,
      overlaps=config.exchange.overlap_steps > 0,
      **more,
    )
  batches = job.corpus.batches(config.run.batch_sizes)
  return DecoupledHandler(config, batches, syncer)


def run_learners(job: TrainJob, servers: PodServers) -> Finished | Stopped:
  """Lets learners train a job until TRAIN_STEPS or a stop signal.

  Raises UserError if the address or a file of LEARNERS cannot be used, or the
  disk has no space.
  """
  share = job.config.learners.audit_share
  folder = ModelDir(job.model_dir).audits
  audits = None if share is None else Audits(folder, share)
  with _open_weights(job, servers) as (weights, pods):
    job = job.record_kernels(pods.kernels)
    while True:
      if audits and audits.undone is not None:
        step = audits.undone * job.config.exchange.period
        _logger.warning(f"goes back to step {step}, without a liar's work")
        remove_later(job.model_dir, step)
        job = dataclasses.replace(job, checkpoint=newest_whole(job.model_dir))
      with contextlib.suppress(UndoneError):
        return _run_once(job, weights, audits, lambda: pods.stop.signal_name)


def _run_once(
  job: TrainJob,
  weights: "_Weights",
  audits: Audits | None,
  signal_name: Callable[[], str],
) -> Finished | Stopped:
  """Runs until the end or a stop signal.

  Raises UndoneError if work of a liar has to be undone.
  """
  state = _state_of(job)
  # With audits there is no replay, so the record may have undone work.
  num_events = sys.maxsize if audits else state.get("events", 0)
  with (
    open_records(job) as records,
    records.writer,
    Record(ModelDir(job.model_dir).merges, num_events) as record,
  ):
    outer = _read_outer(job, weights.arrays.read())
    handler = _make_handler(job, outer, audits, state=state, note=record.note)
    run = _Run(job, handler, record, weights, records)
    own = job.config.learners
    has_auditor = audits and own.audit_by == "client"
    with (
      auditing(handler) if has_auditor else contextlib.nullcontext(),
      serve_learners(own, handler),
    ):
      return run.run(signal_name, audits)


def serve_learners(
  config: LearnersConfig, handler: DecoupledHandler
) -> AbstractContextManager[int]:
  """Answers learners while the body runs; yields the port."""
  host, port = split_address("LEARNERS", config.learners)
  members = Members(config.learner_tokens)
  ip = resolve("LEARNERS", host)
  return serve(ip, int(port), config.learners_tls, members, handler)


@contextlib.contextmanager
def _open_weights(
  job: TrainJob, servers: PodServers
) -> Iterator[tuple["_Weights", Pods]]:
  """Opens the client's own pod, with the weights after `job.step` steps."""
  job = dataclasses.replace(job, config=_on_client(job.config))
  with connect_pods(job, servers) as pods, pods.cluster.client() as client:
    given = job, client, pods.cluster, pods.heartbeat
    session = TrainSession(*given, newest=lambda: job.checkpoint)
    session.set_variables(job)
    yield _Weights(job, client, session), pods


class UndoneError(Exception):
  """A liar's work was undone; the run continues from an earlier round."""


class _Weights:
  """The weights on the client's own pod, which validates them."""

  def __init__(self, job: TrainJob, client: Client, session: TrainSession):
    run = job.config.run
    step = session.make_step(run.batch_sizes.size(0))
    names = [*saved_shapes(job.config.model)]
    self.arrays = PodArrays(client, step.programs.slices, names)
    self._losses, self._corpus, self._run = step.losses, job.corpus, run

  def validate(self, parameters: Arrays) -> dict[str, float]:
    """Returns the metrics of the validation rows."""
    self.arrays.set(parameters)
    batches = self._corpus.validation_batches(
      batch_size=self._run.batch_sizes.size(0),
      num_rows=self._run.num_validation_rows,
    )
    means = mean_losses(self._losses, batches)
    named = zip(VALIDATED, means, strict=False)
    return {f"validation_{name}": mean for name, mean in named}


class _Run:
  """The client's loop: merges; logs, validates, samples and saves when due."""

  def __init__(
    self,
    job: TrainJob,
    handler: DecoupledHandler,
    record: Record,
    weights: _Weights,
    records: Records,
  ):
    self._job, self._handler, self._record = job, handler, record
    self._weights, self._syncer = weights, handler.syncer
    self._metrics, self._progress, self._writer, self._watchdog = records
    self._step, self._validation_loss = job.step, math.nan
    self._means: dict[str, float] = {}  # of the last results
    self._logged, self._said = (job.step, time.monotonic()), ""

  def run(
    self, signal_name: Callable[[], str], audits: Audits | None
  ) -> Finished | Stopped:
    """Merges until the run ends, or a signal has come."""
    syncer, snapshot, is_done = self._syncer, self._take(), False
    if audits and audits.undone is not None:
      # Save first: after `finish_undo`, the undo cannot be repeated.
      self._save(snapshot)
      self._writer.wait()
      audits.finish_undo()
    while not is_done and not signal_name():
      with self._handler.changed:
        self._handler.changed.wait(_TICK_SECS)
        if self._handler.failure:
          raise self._handler.failure
        if audits and audits.undone is not None:
          raise UndoneError
        syncer.tick(time.monotonic())
        snapshot = self._take()
      is_done = snapshot.is_done
      self._writer.check()
      self._watchdog.expect_slow()
      self._act(snapshot)
      if not is_done:
        self._say()
    # The loop has not validated if the run began with no step left.
    if is_done and math.isnan(self._validation_loss):
      self._measure(snapshot, {})
    self._save(snapshot)
    newest = self._writer.wait()
    if not is_done or not newest:
      return Stopped(newest, signal_name())
    self._wait_for_learners()
    return Finished(newest, self._validation_loss)

  def _wait_for_learners(self) -> None:
    """Waits until learners have asked once more, and heard of the end."""
    end = time.monotonic() + _END_SECS
    while self._syncer.members and time.monotonic() < end:
      time.sleep(_TICK_SECS)

  def _take(self) -> "_Snapshot":
    syncer, outer = self._syncer, self._syncer.outer
    rounds = syncer.num_done // self._job.config.pods.num_pods
    return _Snapshot(
      rounds * self._job.config.exchange.period,
      syncer.is_done,
      dict(outer.parameters),  # a merge makes new arrays
      dict(outer.momentum),
      {**syncer.state, "events": self._record.num_events},
    )

  def _act(self, now: "_Snapshot") -> None:
    """Does what is due after the steps since the last call."""
    run, before, job = self._job.config.run, self._step, self._job
    self._step, is_last = now.step, now.step == run.train_steps
    if now.step == before or (is_last and not now.is_done):
      self._step = before
      return

    def is_due(every: int | None) -> bool:
      return every is not None and now.step // every > before // every

    metrics: dict[str, float] = {}
    if is_due(run.eval_steps) or is_last:
      self._measure(now, metrics)
    if is_due(run.log_steps) or metrics:
      self._log(now.step, metrics)
    makes_samples = is_due(run.sample_steps) and not is_last
    if is_due(run.checkpoint_steps) or makes_samples:
      self._save(now)
    if makes_samples and (newest := self._writer.wait()):
      job.write_samples(newest, {})

  def _measure(self, now: "_Snapshot", metrics: dict[str, float]) -> None:
    metrics |= self._weights.validate(now.parameters)
    metrics["unigram_entropy"] = self._job.unigram_entropy
    self._validation_loss = metrics["validation_loss"]
    _logger.info(
      f"step {now.step}  validation loss {self._validation_loss:.4f}"
    )

  def _log(self, step: int, metrics: dict[str, float]) -> None:
    """Writes metrics: means over learners, and numbers for each learner."""
    config, (last, since) = self._job.config, self._logged
    self._logged = step, time.monotonic()
    secs = (self._logged[1] - since) / (step - last)
    tokens = config.run.batch_sizes.size(0) * config.model.sequence_length
    with self._handler.changed:
      means, num_bytes = self._handler.take_metrics()
      self._means = means = means or self._means
      metrics = means | metrics  # the client's own values win
      figures = self._syncer.figures()
      num_learners = len(self._syncer.members)
      merges = self._syncer.outer.num_merges
    for member, (merged, lag, trained) in figures.items():
      metrics |= {
        f"last_sync/{member}": merged,
        f"lag/{member}": lag,
        f"tokens/{member}": trained,
      }
    metrics |= {
      "tokens": step * tokens,
      "global_batch_tokens": tokens,
      "tokens_per_sec": tokens / secs,
      "step_secs": secs,
      "checkpoint_wait_secs": self._writer.take_wait_secs(),
      "host_memory_bytes": resident_bytes(),
      "num_pods": num_learners,
      "merges": merges,
      "dcn_bytes": num_bytes / (step - last),
    }
    self._metrics.write(step, metrics)
    loss = means.get("loss", math.nan)
    self._progress.update(
      step, loss=loss, tokens_per_sec=tokens / secs, mfu=None
    )

  def _save(self, now: "_Snapshot") -> None:
    """Starts to write a checkpoint, if the step has none yet."""
    if now.step == self._writer.step:
      return
    manifest = dataclasses.replace(
      self._job.manifest,
      step=now.step,
      next_row=self._job.config.run.batch_sizes.rows_before(now.step),
      data={**self._job.manifest.data, _STATE: now.state},
    )
    arrays = now.parameters | {
      f"{x}/{_MOMENTUM}": y for x, y in now.momentum.items()
    }

    def write(prefix: str) -> dict[str, Any]:
      write_arrays(prefix, arrays)
      return {}

    self._metrics.sync()
    self._writer.write(manifest, lambda: write)

  def _say(self) -> None:
    """Logs once for which learners the run waits."""
    with self._handler.changed:
      lack = self._syncer.lack
    if lack and lack != self._said:
      where = self._job.config.learners.learners
      _logger.info(f"{lack}; waiting for more at {where}")
    self._said = lack


class _Snapshot(NamedTuple):
  """The outer parameters after a step, for a checkpoint."""

  step: int
  is_done: bool  # whether nothing is left to merge
  parameters: dict[str, np.ndarray]
  momentum: dict[str, np.ndarray]
  state: dict[str, Any]


def replay_run(job: TrainJob, servers: PodServers) -> Iterator[int]:
  """Computes the record of a run again; yields each merge's number.

  Raises UserError if a merge has other bits than in the record.
  """
  job = dataclasses.replace(job, checkpoint=None)  # from the first step
  with _open_weights(job, servers) as (weights, _):
    outer = _read_outer(job, weights.arrays.read())
  events = read_json_lines(ModelDir(job.model_dir).merges)
  yield from replay(events, _make_handler(job, outer, None))


class _Connection(LearnerClient):
  """Calls the handler without a network, until `is_over`."""

  def __init__(self, handler: DecoupledHandler):
    self._handler, self.is_over = handler, False

  def call(
    self, method: str, message: Message, check: Check | None = None
  ) -> Message:
    del check
    if method == "next" and self.is_over:
      return Message({"kind": "done"})
    given = message if method == "contribute" else message.header
    answer: Message = getattr(self._handler, method)(AUDITOR, given)
    return answer


@contextlib.contextmanager
def auditing(handler: DecoupledHandler) -> Iterator[None]:
  """While the body runs, computes audited tasks in a thread."""
  connection = _Connection(handler)

  def run() -> None:
    try:
      take_part(connection, {"kernels": describe_kernels()}, {})
    except BaseException as error:
      handler.failure = error  # the client's loop raises it

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  try:
    yield
  finally:
    connection.is_over = True
    thread.join()
