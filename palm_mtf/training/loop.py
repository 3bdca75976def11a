# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The training loop: steps, and actions such as logging and saving after them.

Batch and learning rate are functions of the step's number, so that a run that
is stopped and resumed computes the same bits as a run that is not stopped.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from palm_mtf.accounting.communication import dcn_bytes
from palm_mtf.accounting.flops import utilization
from palm_mtf.accounting.work import Work
from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.checkpoints.writer import BackgroundWriter
from palm_mtf.data.batches.corpus import Prefetcher
from palm_mtf.data.batches.server_batches import batches_spec
from palm_mtf.generation.inference.sessions import mean_losses
from palm_mtf.machine.host_memory import resident_bytes
from palm_mtf.machine.process import StopRequest
from palm_mtf.model_dir.metrics import MetricsWriter
from palm_mtf.programs.step_programs import VALIDATED
from palm_mtf.training.job import (
  Finished,
  Moved,
  Spike,
  Stopped,
  TrainJob,
  has_samples,
)
from palm_mtf.training.loss_spikes import SpikePolicy
from palm_mtf.training.progress import (
  Clock,
  TrainProgress,
  Watchdog,
  count_rows_left,
)
from palm_mtf.training.session import TrainSession
from palm_mtf.training.step import NonFiniteStepError
from palm_mtf.training.step_trace import write_trace
from palm_mtf.training.teacher import Teacher

_logger = logging.getLogger(__name__)

# A thread makes the batches of this many calls in advance, so that steps do not
# wait for data. A call runs at most STEPS_PER_LOOP steps.
_CALLS_AHEAD = 2
# A run predicts its remaining time after this many timed steps, or seconds of
# timed steps, whichever comes first.
_STEPS_TO_PREDICT, _SECS_TO_PREDICT = 3, 10.0

Event = Finished | Moved | Stopped | Spike


class Records(NamedTuple):
  """Objects that record a run from a step on; a rewind makes new ones."""

  metrics: MetricsWriter
  progress: TrainProgress
  writer: BackgroundWriter
  watchdog: Watchdog


@dataclasses.dataclass(frozen=True, kw_only=True)
class Action:
  """Something that a run does after some of its steps.

  Attributes:
    run: performs the action. It gets the step's metrics, to which it may add,
      and the step's checkpoint if `needs_checkpoint`.
    every: the action is due after every multiple of this many steps; if None,
      only after `steps`.
    steps: further steps after which the action is due.
    at_end: whether the action is due after TRAIN_STEPS; if None, `every` and
      `steps` decide.
    needs_checkpoint: whether the step is saved first.
    measures: whether the action adds metrics that must be written even if no
      metrics are due after the step.
    writes_measures: whether the action writes metrics. Such an action is also
      due whenever an earlier action with `measures` is due.
    is_lost: returns whether the action did not end, because the run was killed
      after it saved the step. Then the resumed run repeats the action.
  """

  run: Callable[..., None]
  every: int | None
  steps: Sequence[int] = ()
  at_end: bool | None = None
  needs_checkpoint: bool = False
  measures: bool = False
  writes_measures: bool = False
  is_lost: Callable[[], bool] = lambda: False

  def is_due(self, step: int, train_steps: int) -> bool:
    """Returns whether `every`, `steps` and `at_end` make the action due."""
    if self.every is None:
      return step in self.steps
    if step == train_steps and self.at_end is not None:
      return self.at_end
    return step % self.every == 0 or step in self.steps

  def find_next_steps(self, step: int) -> list[int]:
    """Returns the later steps in `steps`, and the next multiple of `every`."""
    found = [x for x in self.steps if x > step]
    if self.every is not None:
      found.append(step - step % self.every + self.every)
    return found


class TrainLoop:
  """Runs the steps of a session until an event, such as a spike, ends them."""

  def __init__(
    self,
    job: TrainJob,
    session: TrainSession,
    spikes: SpikePolicy,
    records: Records,
    peak: float,
    must_move: Callable[[], bool],
  ):
    """Prepares the steps after `job.step`, whose weights `session` has.

    `peak` is the peak FLOP/s of all devices together, for MFU. `must_move`
    returns whether the run has to continue on other servers.
    """
    self._job, self._config, self._session = job, job.config, session
    self._spikes, self._peak, self._must_move = spikes, peak, must_move
    self._during = session.during
    self._metrics, self._progress, self._writer, self._watchdog = records
    self._step_clock, self._data_clock = Clock(), Clock()
    self._validation_loss: float | None = None
    self._step = job.step
    self._use_batch_size(self._config.run.batch_sizes.size(job.step))
    run, sizes = self._config.run, self._config.run.batch_sizes
    batches = job.corpus.batches(sizes, spikes.skips)
    depth = _CALLS_AHEAD * self._config.mesh_layout.steps_per_loop
    self._ahead = Prefetcher(batches.batch, run.train_steps, depth)
    self._described = batches_spec(job.corpus, sizes, spikes.skips)
    self._teacher = Teacher(job, self._watchdog.expect_slow)
    self._actions = self._list_actions()

  def _list_actions(self) -> list[Action]:
    """Returns all actions, in the order in which they run after a step."""
    job, run, pods = self._job, self._config.run, self._config.pods
    asserts = bool(self._config.evaluation.assertions)
    samples = Action(
      run=lambda metrics, checkpoint: job.write_samples(checkpoint, metrics),
      every=run.sample_steps,
      at_end=False,  # commands/train.py makes the last step's samples
      needs_checkpoint=True,
      measures=asserts,
      is_lost=lambda: (
        not has_samples(job.model_dir, self._step)
        or (asserts and self._metrics.last_step < self._step)
      ),
    )
    return [
      Action(
        run=self._compare_pods,
        every=pods.fingerprint_steps if pods.num_pods > 1 else None,
      ),
      Action(
        run=self._measure_loss, every=run.eval_steps, at_end=True, measures=True
      ),
      Action(
        run=self._evaluate_tasks,
        every=self._config.evaluation.task_eval_steps,
        at_end=True,
        needs_checkpoint=True,
        measures=True,
        is_lost=lambda: self._metrics.last_step < self._step,
      ),
      *([samples] if asserts else []),
      Action(
        run=self._log,
        every=run.log_steps,
        steps=run.trace_steps,
        writes_measures=True,
      ),
      *([] if asserts else [samples]),
      Action(run=self._save, every=run.checkpoint_steps),
    ]

  def run(self, stop: StopRequest) -> Event:
    """Runs all remaining steps and actions; returns what ended the loop."""
    with self._ahead, self._writer, self._teacher:
      self._repeat_lost_actions()
      while self._step < self._config.run.train_steps and not (
        stop.signal_name and self._config.exchange.can_save(self._step)
      ):
        with self._during("while a checkpoint was written"):
          self._writer.check()
        # Move only from a saved step, so that no step is repeated.
        if self._step == self._writer.step and self._must_move():
          _logger.info(f"step {self._step}  moving to other servers")
          return Moved(self._wait_for_writer())
        for metrics in self._run_steps():
          self._step += 1
          # Ignore the call's steps after a spike: the rewind undoes them.
          if self._spikes.sees_spike(metrics):
            return self._rewind(metrics["loss"], stop)
        self._predict_time()
        self._run_actions(self._find_due_actions(), metrics)
      return self._end(stop)

  def _end(self, stop: StopRequest) -> Event:
    """Saves the last step; returns the event that ends this loop."""
    self._save()
    newest = self._wait_for_writer()
    is_done = self._step == self._config.run.train_steps
    if is_done and self._validation_loss is None:  # no step was left to run
      self._validate()
    if stop.signal_name:
      return Stopped(newest, stop.signal_name)
    return Finished(newest, self._validation_loss)

  def _rewind(self, loss: float, stop: StopRequest) -> Event:
    newest = self._wait_for_writer()
    # After a stop signal do not rewind: the resumed run detects the same spike.
    if stop.signal_name:
      return Stopped(newest, stop.signal_name)
    return Spike(
      *self._spikes.rewind(
        self._job.model_dir,
        self._step,
        loss,
        self._config.run.batch_sizes,
        self._session.read_whole,
      )
    )

  def _find_due_actions(self) -> list[Action]:
    due: list[Action] = []
    for action in self._actions:
      if action.is_due(self._step, self._config.run.train_steps) or (
        action.writes_measures and any(x.measures for x in due)
      ):
        due.append(action)
    return due

  def _run_actions(
    self, actions: Iterable[Action], metrics: dict[str, float]
  ) -> None:
    for action in actions:
      if action.needs_checkpoint:
        self._save()
        self._watchdog.expect_slow()
        action.run(metrics, self._wait_for_writer())
      else:
        action.run(metrics)

  def _repeat_lost_actions(self) -> None:
    """Repeats the actions that a killed run did not finish (`is_lost`)."""
    if not self._job.checkpoint:
      return
    due, metrics = self._find_due_actions(), {}
    lost = [x for x in due if x.needs_checkpoint and x.is_lost()]
    if any(x.measures for x in lost):
      self._run_actions([x for x in due if x.measures], metrics)
      self._metrics.write(self._step, metrics)
    self._run_actions([x for x in lost if not x.measures], metrics)

  def _run_steps(self) -> list[dict[str, float]]:
    """Runs the next call, of one or more steps; returns metrics per step."""
    self._use_batch_size(self._config.run.batch_sizes.size(self._step))
    num_steps, program = self._count_steps_of_call(), self._train_step.programs
    until = self._step + num_steps
    with self._data_clock.running(num_steps):
      batches = [self._described]
      if not program.reads_batches:
        made = (self._ahead.batch(i) for i in range(self._step, until))
        with self._during(f"while the teacher read the rows of step {until}"):
          batches = [self._teacher.add(x) for x in made]
    phase = f"in step {until}"
    if num_steps > 1:
      phase = f"in steps {self._step + 1} to {until}"
    is_traced = until in self._config.run.trace_steps
    # Traced steps take longer, so the mean step time excludes them.
    clock = contextlib.nullcontext if is_traced else self._step_clock.running
    records = [] if is_traced else None
    with clock(num_steps), self._during(phase):
      try:
        if program.loop and not is_traced:
          all_metrics = self._train_step.run_loop(batches, self._step)
        else:
          all_metrics = [self._train_step.run(*batches, self._step, records)]
      except NonFiniteStepError as bad:
        raise self._session.checks.make_step_error(bad) from None
    self._watchdog.note_step(until)
    if is_traced:
      self._watchdog.expect_slow()
      line, figures = write_trace(self._job.model_dir, until, program, records)
      _logger.info(line)
      all_metrics[-1] |= figures
    return all_metrics

  def _use_batch_size(self, size: int) -> None:
    """Sets the next steps' batch size; builds a program for a new size."""
    self._batch_size, self._train_step = size, self._session.make_step(size)

  def _count_steps_of_call(self) -> int:
    """Returns how many steps the next call runs: at most to the next action."""
    step = self._step
    if not self._train_step.programs.loop:
      return 1
    run = self._config.run
    ends = [run.batch_sizes.next_change(step) or run.train_steps]
    ends.append(run.train_steps)
    for action in self._actions:
      ends += action.find_next_steps(step)
    # Also end the call before a traced step, which runs in a separate call.
    ends += [x - 1 for x in self._config.run.trace_steps if x - 1 > step]
    most = self._config.mesh_layout.steps_per_loop
    return min(most, min(ends) - step)

  def _predict_time(self) -> None:
    clock, run = self._step_clock, self._config.run
    if (
      clock.num_steps >= _STEPS_TO_PREDICT
      or clock.total_secs >= _SECS_TO_PREDICT
    ):
      step_secs = clock.total_secs / clock.num_steps
      secs = count_rows_left(run, self._step) / self._batch_size * step_secs
      self._progress.predict_time(step_secs, secs)

  def _compare_pods(self, unused_metrics: dict[str, float]) -> None:
    with self._during(f"while pods were compared after step {self._step}"):
      self._session.checks.check_replicas(self._step)

  def _measure_loss(self, metrics: dict[str, float]) -> None:
    metrics |= self._validate()
    if self._config.loss.preference_beta is None:
      metrics["unigram_entropy"] = self._job.unigram_entropy

  def _validate(self) -> dict[str, float]:
    self._watchdog.expect_slow()
    batches = self._job.corpus.validation_batches(
      batch_size=self._batch_size, num_rows=self._config.run.num_validation_rows
    )
    with self._during(f"while the loss of step {self._step} was measured"):
      with_teacher = map(self._teacher.add_nothing, batches)
      with self._train_step.showing_outer():
        means = mean_losses(self._train_step.losses, with_teacher)
    self._validation_loss = means[0]
    _logger.info(f"step {self._step}  validation loss {means[0]:.4f}")
    named = zip(VALIDATED, means, strict=False)
    return {f"validation_{name}": mean for name, mean in named}

  def _evaluate_tasks(
    self, metrics: dict[str, float], checkpoint: Checkpoint
  ) -> None:
    self._watchdog.expect_slow()
    # Restart the watchdog at each answer, as all answers may take hours.
    answered = self._watchdog.expect_slow
    metrics |= self._job.evaluate_tasks(checkpoint, answered)

  def _log(self, metrics: dict[str, float]) -> None:
    config, step_secs = self._config, self._step_clock.take_mean()
    length = config.model.sequence_length
    batch_tokens = self._batch_size * length
    rate = batch_tokens / step_secs if step_secs else 0.0
    metrics |= {
      "tokens": config.run.batch_sizes.rows_before(self._step) * length,
      "global_batch_tokens": batch_tokens,
      "data_wait_secs": self._data_clock.take_mean(),
      "checkpoint_wait_secs": self._writer.take_wait_secs(),
      "host_memory_bytes": resident_bytes(),
      "num_pods": config.pods.num_pods,
    }
    shares: dict[str, float] = {}
    if not config.model.model_function:  # the formulas are of PaLM's block
      shares = utilization(rate, config.model, self._peak, config.run.frozen)
      metrics["dcn_bytes"] = dcn_bytes(Work.of(config, self._batch_size))
    with self._during(f"while its memory was read after step {self._step}"):
      metrics |= self._session.read_memory()
    # Omit rates if all steps since the last log were traced, thus not timed.
    if step_secs or self._step not in config.run.trace_steps:
      metrics |= {"tokens_per_sec": rate, "step_secs": step_secs, **shares}
    self._metrics.write(self._step, metrics)
    self._progress.update(
      self._step,
      loss=metrics["loss"],
      tokens_per_sec=rate,
      mfu=shares.get("mfu"),
      accuracy=metrics.get("rewards/accuracies"),
    )

  def _wait_for_writer(self) -> Checkpoint | None:
    """Returns the newest checkpoint, or None, once no write is in progress."""
    with self._during("while a checkpoint was written"):
      return self._writer.wait()

  def _save(self, *unused: object) -> None:
    """Starts to write a checkpoint of the last step, if it has none yet."""
    if self._step == self._writer.step:
      return
    job, session = self._job, self._session
    self._watchdog.expect_slow()
    sizes = self._config.run.batch_sizes
    # For readers of the manifest: index of the next step's first row in the
    # training data, skipped rows included. Resumed runs compute it again.
    next_row = self._spikes.skips.rows(sizes.rows_before(self._step), sizes)
    manifest = dataclasses.replace(
      job.manifest,
      step=self._step,
      next_row=next_row,
      data={**job.manifest.data, **self._spikes.make_manifest_data()},
    )
    # Never save variables that are not finite or that differ between pods.
    with self._during(f"while step {self._step} was saved"):
      session.checks.check_finite(self._step)
      session.checks.check_replicas(self._step)
      # Flush the metrics to the disk first, because a run that resumes from
      # this checkpoint writes only the metrics of later steps.
      self._metrics.sync()
      self._writer.write(manifest, session.copier.copy)
