# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The training loop of one session: step, log, evaluate, save.

Batch and learning rate are functions of the step's number: a run that was
stopped and resumed ends with the bits of one that was not.
"""

import contextlib
import dataclasses
import logging
from typing import NamedTuple

from palm_mtf._tf import tf
from palm_mtf.accounting import flops
from palm_mtf.accounting.communication import dcn_bytes
from palm_mtf.checkpoints.hosts import find_checkpoint_hosts
from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.checkpoints.variables import (
  WeightsCopier,
  restore,
  restore_weights,
  whole_reader,
)
from palm_mtf.checkpoints.writer import BackgroundWriter, remove_later
from palm_mtf.cluster.client.connect import Cluster, ServerMemory
from palm_mtf.cluster.client.heartbeat import Heartbeat
from palm_mtf.data.batches.batches import Prefetcher
from palm_mtf.generation.inference.loss_session import mean_loss
from palm_mtf.machine.host_memory import resident_bytes
from palm_mtf.machine.stop_signals import StopRequest
from palm_mtf.mesh.processes import Process
from palm_mtf.model_dir.layout import ModelDir
from palm_mtf.model_dir.metrics import MetricsWriter
from palm_mtf.model_dir.samples import has_samples
from palm_mtf.programs.train_program import TrainProgram, build_train_program
from palm_mtf.trace.write import write_trace
from palm_mtf.training.clock import Clock
from palm_mtf.training.finite_check import FiniteCheck
from palm_mtf.training.host_features import find_features
from palm_mtf.training.job import TrainJob, TrainOutcome
from palm_mtf.training.loss_spikes import SpikePolicy
from palm_mtf.training.progress import TrainProgress, rows_to_compute
from palm_mtf.training.replica_check import ReplicaCheck
from palm_mtf.training.step import NonFiniteStepError, TrainStep
from palm_mtf.training.watchdog import Watchdog

_logger = logging.getLogger(__name__)

_BATCHES_AHEAD = 2  # of a call into the session
# Timed steps, or seconds of them, after which a run says how long it will take.
_STEPS_TO_JUDGE, _SECS_TO_JUDGE = 3, 10.0


class WatchedSession(NamedTuple):
  """A session on the devices of a cluster, and the heartbeat of its servers."""

  cluster: Cluster
  session: tf.Session
  heartbeat: Heartbeat


class TrainLoop:
  """The training loop of a session, for one batch size."""

  def __init__(
    self,
    job: TrainJob,
    where: WatchedSession,
    peak: float,
    metrics: MetricsWriter,
    progress: TrainProgress,
    writer: BackgroundWriter,
    watchdog: Watchdog,
  ):
    # `peak`: FLOP/s of all devices together, for MFU.
    self._job, self._config, self._peak = job, job.config, peak
    self._during = where.heartbeat.during
    self._memory = ServerMemory(where.session, where.cluster.servers)
    self._metrics, self._progress = metrics, progress
    self._writer, self._watchdog = writer, watchdog
    self._step_clock, self._data_clock = Clock(), Clock()
    self._validation_loss: float | None = None
    self._step = job.step
    # Another batch size is another program: supervisor.py starts its loop.
    config, sizes = job.config, job.config.run.batch_sizes
    self._batch_size = sizes.size(self._step)
    self._last_step = config.run.train_steps
    if change := sizes.next_change(self._step):
      self._last_step = min(self._last_step, change)
    self._spikes = SpikePolicy(config.fault_tolerance, job.start, job.rewinds)
    batches = job.corpus.batches(sizes, self._spikes.skips)
    depth = _BATCHES_AHEAD * config.mesh_layout.steps_per_loop
    self._ahead = Prefetcher(batches.batch, self._last_step, depth)
    # From here on a lost pod ends every call into the session, by its phase.
    with self._during("while its servers were asked for batches"):
      where.heartbeat.connect(where.session)
      features = find_features(
        where.session,
        [] if config.mesh_layout.steps_per_loop > 1 else where.cluster.servers,
        job.corpus,
        sizes,
        self._spikes.skips,
      )
    program = build_train_program(
      config.model,
      config.mesh_layout,
      config.optimizer,
      batch_size=self._batch_size,
      seed=config.run.seed,
      features=features,
      pods=config.pods,
      devices=where.cluster.devices,
    )
    self._program = program
    with self._during("while its variables were set"):
      self._set_up(where, program)
    if job.rewinds:  # the weights before the spike are restored
      remove_later(job.model_dir, self._step)

  def _set_up(self, where: WatchedSession, program: TrainProgram) -> None:
    """Sets the variables, and makes the checks and copies between steps."""
    job, session = self._job, where.session
    self._train_step = TrainStep(session, program)
    pods = [x.slices for x in program.pods]
    hosts = find_checkpoint_hosts(
      session,
      Process(program.devices.client),
      where.cluster.servers,
      ModelDir(job.model_dir).checkpoints,
    )
    self._copier = WeightsCopier(session, pods, hosts)
    self._finite_check = FiniteCheck(session, program, self._writer.wait)
    self._replica_check = ReplicaCheck(session, program, self._writer.wait)
    self._read_whole = whole_reader(session, hosts)
    if job.checkpoint:
      if not job.checkpoint.is_verified:
        self._read_whole(job.checkpoint.path)
      restore(session, pods, job.checkpoint.prefix, hosts)
      return
    if job.initial_state:
      # Another run's files are held open: its trainer may remove them.
      files = job.initial_weights.prefix
      restore(session, pods, files, hosts.client_only)
      return
    session.run(program.initialize)
    # Of another run come parameters alone: the optimizer starts anew.
    if job.initial_weights:
      names = set(job.manifest.shapes)
      parameters = [
        {key: x for key, x in pod.items() if names.issuperset(x[0].names)}
        for pod in pods
      ]
      restore_weights(session, parameters, job.initial_weights, hosts)

  def run(self, stop: StopRequest) -> TrainOutcome:
    """Runs the steps that are left, and what is due after each of them."""
    with self._ahead, self._writer:
      return self._run(stop)

  def _run(self, stop: StopRequest) -> TrainOutcome:
    run = self._config.run
    self._evaluate_what_was_cut_off()
    self._sample_what_was_cut_off()
    while self._step < self._last_step and not stop.signal_name:
      with self._during("while a checkpoint was written"):
        self._writer.check()
      for values in self._run_steps():
        self._step += 1
        # The steps of the call after a spike are undone with it.
        if self._spikes.sees_spike(values):
          newest = self._written()
          # A run that goes on from there sees the same spike, and rewinds.
          if stop.signal_name:
            return TrainOutcome(newest, None, stop.signal_name)
          back, rewinds = self._spikes.rewind(
            self._job.model_dir,
            self._step,
            values["loss"],
            run.batch_sizes,
            self._read_whole,
          )
          return TrainOutcome(back, None, "", rewinds)
      self._say_how_long()
      if self._step % self._config.pods.fingerprint_steps == 0:
        with self._during(f"while pods were compared after step {self._step}"):
          self._replica_check.check(self._step)
      # All metrics of a step are in one line: losses and tasks come first.
      values |= self._losses()
      if has_tasks := self._has_tasks():
        values |= self._evaluate_tasks(self._checkpoint_of_now())
      is_due = self._step % run.log_steps == 0 or "validation_loss" in values
      if is_due or has_tasks or self._step in run.trace_steps:
        self._log(values)
      if self._has_samples():
        self._job.write_samples(self._checkpoint_of_now())
      elif self._step % run.checkpoint_steps == 0:
        self._save()
    self._save()  # the last step, or a signal came
    newest = self._written()
    if self._step < run.train_steps:
      return TrainOutcome(newest, None, stop.signal_name)
    if self._validation_loss is None:  # there was no step left to run
      self._validate()
    return TrainOutcome(newest, self._validation_loss, stop.signal_name)

  def _evaluate_what_was_cut_off(self) -> None:
    """Evaluates the checkpoint to resume from, unless its step has metrics."""
    # A run that is killed in an evaluation has saved its step, and has lost
    # what it had not logged of it.
    checkpoint = self._job.checkpoint
    if (
      checkpoint and self._has_tasks() and self._metrics.last_step < self._step
    ):
      values = self._losses() | self._evaluate_tasks(checkpoint)
      self._metrics.write(self._step, values)

  def _sample_what_was_cut_off(self) -> None:
    """Samples the checkpoint to resume from, unless its step has samples."""
    # A run that is killed while it samples has saved its step.
    job = self._job
    if (
      job.checkpoint
      and self._has_samples()
      and not has_samples(job.model_dir, self._step)
    ):
      self._watchdog.expect_slow()
      job.write_samples(job.checkpoint)

  def _has_samples(self) -> bool:
    """Whether samples are due after this step; train.py takes the last's."""
    every = self._config.run.sample_steps
    is_last = self._step == self._config.run.train_steps
    return every is not None and not is_last and self._step % every == 0

  def _has_tasks(self) -> bool:
    """Whether tasks are due after this step."""
    every = self._config.evaluation.task_eval_steps
    is_last = self._step == self._config.run.train_steps
    return every is not None and (is_last or self._step % every == 0)

  def _evaluate_tasks(self, checkpoint: Checkpoint) -> dict[str, float]:
    self._watchdog.expect_slow()
    # Each answer is a sign of life: all of them may take hours.
    return self._job.evaluate_tasks(checkpoint, self._watchdog.expect_slow)

  def _losses(self) -> dict[str, float]:
    """Returns the validation loss and its reference where they are due."""
    run = self._config.run
    if self._step != run.train_steps and self._step % run.eval_steps:
      return {}
    self._validate()
    return {
      "validation_loss": self._validation_loss,
      "unigram_entropy": self._job.unigram_entropy,
    }

  def _run_steps(self) -> list[dict[str, float]]:
    """Runs the steps of one call into the session; returns their metrics."""
    num_steps = self._steps_of_call()
    until = self._step + num_steps
    with self._data_clock.running(num_steps):
      batches = [None]
      if not self._program.hosts_read:
        batches = [self._ahead.batch(i) for i in range(self._step, until)]
    phase = f"in step {until}"
    if num_steps > 1:
      phase = f"in steps {self._step + 1} to {until}"
    is_traced = until in self._config.run.trace_steps
    # Tracing takes time, which is not in the mean of a step.
    clock = contextlib.nullcontext if is_traced else self._step_clock.running
    records = [] if is_traced else None
    with clock(num_steps), self._during(phase):
      try:
        if self._program.loop and not is_traced:
          all_values = self._train_step.run_loop(batches, self._step)
        else:
          all_values = [self._train_step.run(*batches, self._step, records)]
      except NonFiniteStepError as bad:
        raise self._finite_check.error_of_step(bad) from None
    self._watchdog.step_done(until)
    if is_traced:
      self._watchdog.expect_slow()
      trace = write_trace(self._job.model_dir, until, self._program, records)
      _logger.info(trace.says)
      all_values[-1] |= trace.figures
    return all_values

  def _say_how_long(self) -> None:
    """Says the time of the steps and losses that are left, once."""
    clock, run = self._step_clock, self._config.run
    if clock.num_steps < _STEPS_TO_JUDGE and clock.total_secs < _SECS_TO_JUDGE:
      return
    step_secs = clock.total_secs / clock.num_steps
    secs = rows_to_compute(run, self._step) / self._batch_size * step_secs
    self._progress.say_how_long(step_secs, secs)

  def _steps_of_call(self) -> int:
    """Returns the number of steps until something is due."""
    if not self._program.loop:
      return 1
    run, evaluation = self._config.run, self._config.evaluation
    every = [run.log_steps, run.eval_steps, run.checkpoint_steps]
    every += filter(None, [run.sample_steps, evaluation.task_eval_steps])
    ends = [self._last_step, *(n - self._step % n + self._step for n in every)]
    for traced in run.trace_steps:  # alone in its call
      ends += [x for x in (traced - 1, traced) if x > self._step]
    return min(self._program.loop.max_steps, min(ends) - self._step)

  def _validate(self) -> None:
    """Measures the validation loss, nats a token."""
    self._watchdog.expect_slow()
    batches = self._job.corpus.validation_batches(
      batch_size=self._batch_size,
      num_rows=self._config.run.num_validation_rows,
    )
    with self._during(f"while the loss of step {self._step} was measured"):
      self._validation_loss = mean_loss(self._train_step.losses, batches)
    _logger.info(
      f"step {self._step}  validation loss {self._validation_loss:.4f}"
    )

  def _log(self, values: dict[str, float]) -> None:
    config, step_secs = self._config, self._step_clock.take_mean()
    length = config.model.sequence_length
    batch_tokens = self._batch_size * length
    rate = batch_tokens / step_secs if step_secs else 0.0
    mfu = flops.mfu(rate, config.model, self._peak)
    values |= {
      "tokens": config.run.batch_sizes.rows_before(self._step) * length,
      "global_batch_tokens": batch_tokens,
      "data_wait_secs": self._data_clock.take_mean(),
      "checkpoint_wait_secs": self._writer.take_wait_secs(),
      "host_memory_bytes": resident_bytes(),
      "num_pods": config.pods.num_pods,
      "dcn_bytes": dcn_bytes(config.model, config.mesh_layout, config.pods),
    }
    with self._during(f"while its memory was read after step {self._step}"):
      values |= self._memory.read()
    # Between two lines of traced steps no step may have been timed.
    if step_secs or self._step not in config.run.trace_steps:
      hfu = flops.hfu(rate, config.model, self._peak)
      values |= {"tokens_per_sec": rate, "step_secs": step_secs}
      values |= {"mfu": mfu, "hfu": hfu}
    self._metrics.write(self._step, values)
    self._progress.update(
      self._step, loss=values["loss"], tokens_per_sec=rate, mfu=mfu
    )

  def _checkpoint_of_now(self) -> Checkpoint:
    """Returns the checkpoint of this step, once it is written."""
    self._save()
    self._watchdog.expect_slow()  # sampling or tasks come next
    return self._written()

  def _written(self) -> Checkpoint | None:
    """Returns the newest checkpoint, once it is written."""
    with self._during("while a checkpoint was written"):
      return self._writer.wait()

  def _save(self) -> None:
    """Starts to write a checkpoint of this step, unless there is one."""
    if self._step == self._writer.step:
      return
    job = self._job
    self._watchdog.expect_slow()
    sizes = self._config.run.batch_sizes
    # The row that the next step reads, skipped batches included.
    next_row = self._spikes.skips.rows(sizes.rows_before(self._step), sizes)
    manifest = dataclasses.replace(
      job.manifest,
      step=self._step,
      next_row=next_row,
      data={**job.manifest.data, **self._spikes.manifest_data()},
    )
    # What is not finite, or differs between pods, is never saved.
    with self._during(f"while step {self._step} was saved"):
      self._finite_check.check_variables(self._step)
      self._replica_check.check(self._step)
      self._metrics.sync()  # what a checkpoint comes after is not lost
      self._writer.write(manifest, self._copier.copy)
