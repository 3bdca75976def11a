# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluates checkpoints on SeqIO tasks, and keeps what came of it.

  MODEL_DIR/eval/events...                             for TensorBoard
  MODEL_DIR/eval/step_00000200/my_task-validation.json           the metrics
                               my_task-validation.jsonl          the examples
                               my_task-validation.answers.jsonl  what the model
                                                                 said

A file of examples has inputs, targets and predictions, an object a line. What
is asked again, after an interruption or with another metric function, is read
from the answers; the model is loaded only for what is missing.
"""

import dataclasses
import functools
import json
import os
import urllib.parse
from collections.abc import Iterator

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.checkpoints import Checkpoint
from palm_mtf.config import PalmConfig, RunConfig
from palm_mtf.console import say
from palm_mtf.data.vocabulary import Vocabulary
from palm_mtf.decode_config import DecodeConfig
from palm_mtf.disk import write_atomically
from palm_mtf.eval_tasks import EvalTask, TaskResult, open_eval_tasks
from palm_mtf.layout import MeshLayout
from palm_mtf.metrics import summary_of
from palm_mtf.task_answers import AnswerJournal, CheckpointModel, TaskAnswers
from palm_mtf.task_eval_config import TaskEvalConfig


@dataclasses.dataclass(frozen=True)
class TaskOutcome:
  """The metrics of one task by one checkpoint.

  Attributes:
    step: of the checkpoint.
    checkpoint: its path.
    task: name.
    split: of the task.
    num_examples: that were answered.
    num_cut: examples whose inputs lost their beginning, to fit.
    metrics: numbers, or texts, by name.
  """

  step: int
  checkpoint: str
  task: str
  split: str
  num_examples: int
  num_cut: int
  metrics: dict[str, float | str]

  @property
  def numbers(self) -> dict[str, float]:
    """The metrics that are numbers, by task and name."""
    return {
      f"{self.task}/{name}": value
      for name, value in self.metrics.items()
      if isinstance(value, float)
    }


class TaskEvaluation:
  """The tasks of EVAL_TASKS, ready for any checkpoint of a run."""

  def __init__(
    self,
    model_dir: str,
    model: PalmConfig,
    mesh: MeshLayout,
    vocabulary: Vocabulary,
    decode: DecodeConfig,
    *,
    run: RunConfig,
    tasks: TaskEvalConfig,
  ):
    """Opens the tasks and reads their examples.

    Args:
      model_dir: of the run.
      model: the architecture.
      mesh: devices and layout rules.
      vocabulary: of the run.
      decode: how predictions are chosen.
      run: sample_tokens and seed are read.
      tasks: which, and what of them.

    Raises:
      UserError: see `open_eval_tasks`.
    """
    self._folder = os.path.join(model_dir, "eval")
    self._model = (model, mesh, vocabulary, decode, run)
    self._tasks = open_eval_tasks(tasks, vocabulary, model.sequence_length)
    self._depends_on = {
      "vocabulary": vocabulary.sha256,
      "SEQUENCE_LENGTH": model.sequence_length,
      "ACTIVATION_DTYPE": model.activation_dtype,
      "SAMPLE_TOKENS": run.sample_tokens,
      "SEED": run.seed,
      **{k.upper(): v for k, v in dataclasses.asdict(decode).items()},
    }

  def evaluate(self, checkpoint: Checkpoint) -> Iterator[TaskOutcome]:
    """Yields what comes of each task, when it is kept.

    Raises:
      UserError: a task's code fails, or the disk is full.
    """
    step = checkpoint.manifest.step
    with CheckpointModel(checkpoint, *self._model) as model:
      for task in self._tasks:
        name = urllib.parse.quote(f"{task.name}-{task.split}", safe="")
        path = os.path.join(self._folder, f"step_{step:08d}", name)
        depends_on = {
          "checkpoint": checkpoint.blake2b,
          "examples": task.fingerprint,
          **self._depends_on,
        }
        with AnswerJournal(f"{path}.answers.jsonl", depends_on) as journal:
          answers = TaskAnswers(task, model, journal)
          result = task.evaluate(step, answers)
        outcome = TaskOutcome(
          step=step,
          checkpoint=checkpoint.path,
          task=task.name,
          split=task.split,
          num_examples=len(task.targets),
          num_cut=answers.num_cut,
          metrics=result.metrics,
        )
        self._keep(path, task, outcome, result)
        yield outcome

  def _keep(
    self, path: str, task: EvalTask, outcome: TaskOutcome, result: TaskResult
  ) -> None:
    if outcome.num_cut:
      say(
        f"{task.name}: of {outcome.num_cut:,} of {outcome.num_examples:,} "
        "examples the inputs were too long and lost their beginning"
      )
    lines = [json.dumps(x, default=_as_json) + "\n" for x in result.records]
    write_atomically(f"{path}.jsonl", "".join(lines).encode())
    content = json.dumps(dataclasses.asdict(outcome), indent=1).encode()
    if _read(f"{path}.json") == content:
      return  # TensorBoard has it
    write_atomically(f"{path}.json", content)
    self._events.add_summary(summary_of(outcome.numbers), outcome.step)
    self._events.flush()

  @functools.cached_property
  def _events(self) -> tf.summary.FileWriter:
    with tf.Graph().as_default():  # it refuses to be made where eager code runs
      return tf.summary.FileWriter(self._folder)


def _read(path: str) -> bytes:
  if not os.path.exists(path):
    return b""
  with open(path, "rb") as file:
    return file.read()


def _as_json(value: object) -> object:
  """Returns what json writes of a value that it does not know."""
  if isinstance(value, (np.ndarray, np.generic)):
    return value.tolist()
  if isinstance(value, bytes):
    return value.decode("utf-8", "replace")
  return repr(value)
