# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluates checkpoints on SeqIO tasks, and writes the results to files.

MODEL_DIR/eval/events...                for TensorBoard
MODEL_DIR/eval/step_00000200/
  my_task-validation.json               metrics
  my_task-validation.jsonl              examples with predictions
  my_task-validation.answers.jsonl      AnswerJournal, for a later evaluation
MODEL_DIR/eval/contamination/
  my_task-validation-<hash>.json        examples that the training text contains
"""

import dataclasses
import functools
import logging
import os
import pathlib
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from palm_mtf.assertions.assertions import Assertions, Example
from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.config import Config
from palm_mtf.data.filters.decide import MeasuringPool
from palm_mtf.data.filters.filtered_source import open_filtered
from palm_mtf.data.ngrams import ContainedExamples
from palm_mtf.data.sources.document import (
  TRAIN,
  Document,
  Source,
  hash_parts,
  num_repeats,
  read_with_progress,
)
from palm_mtf.data.sources.files import FileDigests, writable_folder
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError
from palm_mtf.evaluation.answers import (
  AnswerJournal,
  CheckpointModel,
  TaskAnswers,
  select_settings,
)
from palm_mtf.evaluation.seqio_tasks import EvalTask, TaskResult
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.atomic_files import write_atomically
from palm_mtf.model_dir.foreign_files import read_sealed, seal
from palm_mtf.model_dir.json_lines import write_json_lines
from palm_mtf.model_dir.metrics import EventsWriter
from palm_mtf.model_dir.paths import ModelDir, step_name
from palm_mtf.retrieval.keys import describe_index
from palm_mtf.user_code import user_code

_logger = logging.getLogger(__name__)


# Increase this if "contaminated" is redefined, so that no stored list is used.
_VERSION = 1


def find_clean_examples(
  model_dir: str, config: Config, tasks: Iterable[EvalTask]
) -> dict[str, list[int]]:
  """Returns {name of a task: indices of its clean examples}.

  As in PaLM (section 8), an example is contaminated if at least 70% of its word
  8-grams, from inputs and targets without exemplars, occur anywhere in the
  training documents that pass the run's filters. If one option of a question is
  contaminated, all options of this question are. Examples of fewer than 8 words
  are clean.

  The text is read once for all tasks that have no stored result in MODEL_DIR.

  Raises UserError if the training text is missing or consists of token ids, or
  the disk is full.
  """
  folders = ModelDir(model_dir)
  sources = open_filtered(model_dir, config.data, config.model.sequence_length)
  folder = writable_folder(config.data.cache_folder, folders.tokens)
  with FileDigests(os.path.join(folder, "digests.json")) as digests:
    text = [source.fingerprint(digests) for source in sources]
  paths, found, clean = {}, {}, {}
  for task in tasks:
    # The file's name depends only on the training documents and the task's
    # examples, because the file must be found if other settings change.
    examples = [each.digest() for each in task.texts]
    key = hash_parts((_VERSION, text, examples), num_bytes=8)
    name = urllib.parse.quote(f"{task.name}-{task.split}-{key}.json", safe="")
    paths[task] = os.path.join(folders.contamination, name)
    found[task] = _read(paths[task])
  missing = [task for task, numbers in found.items() if numbers is None]
  if missing:
    for task, numbers in _search(sources, missing).items():
      content = {"examples": len(task.targets), "contaminated": numbers}
      write_atomically(paths[task], json_text(seal(content)).encode())
      found[task] = numbers
  for task, numbers in found.items():
    count = len(task.targets)
    _logger.info(
      f"{task.name}: the training text contains {len(numbers):,} of {count:,} "
      "examples"
    )
    clean[task.name] = sorted({*range(count)} - {*numbers})
  return clean


def _search(
  sources: Sequence[Source], tasks: Sequence[EvalTask]
) -> dict[EvalTask, list[int]]:
  """Returns {task: indices of its contaminated examples}."""
  examples = ContainedExamples(text for task in tasks for text in task.texts)
  found = np.zeros(len(examples.table), bool)
  with MeasuringPool(None, examples) as pool:
    for source in sources:
      for measures in pool.measure(_read_training_texts(source)):
        for ngrams in measures.ngrams:
          found[ngrams] = True
  contained = examples.contained(found)
  ends = np.cumsum([len(task.texts) for task in tasks])[:-1]
  return {
    task: _complete_questions(task, np.flatnonzero(mine).tolist())
    for task, mine in zip(tasks, np.split(contained, ends), strict=True)
  }


def _complete_questions(task: EvalTask, contained: Sequence[int]) -> list[int]:
  """Adds the other options of each question with a contaminated option."""
  questions = {task.questions[number] for number in contained}
  return [n for n, each in enumerate(task.questions) if each in questions]


def _read_training_texts(source: Source) -> Iterable[Document]:
  for split, document in read_with_progress(source, "Comparing"):
    if not isinstance(document.text, str):
      raise UserError(
        f"CLEAN_SUBSET = True: {source.name} makes token ids, which cannot be "
        "compared with the text of examples; set it to False."
      )
    if split == TRAIN and num_repeats(document):
      yield document


def _read(path: str) -> list[int] | None:
  try:
    return read_sealed(path)[0]["contaminated"]
  except (OSError, ValueError):
    return None  # the file is missing or damaged; the caller searches again


@dataclasses.dataclass(frozen=True)
class TaskOutcome:
  """The metrics of one checkpoint on one task."""

  step: int
  checkpoint: str  # path
  task: str
  split: str
  activation_dtype: str
  num_examples: int
  num_cut: int  # number of examples with truncated inputs
  # {name: number or text}; "<name>_clean" is computed from clean examples only.
  metrics: dict[str, float | str]
  categories: dict[str, dict[str, float]]  # {category: {metric: value}}
  num_clean: int | None = None  # clean examples; None without CLEAN_SUBSET

  @property
  def numbers(self) -> dict[str, float]:
    """The metrics that are numbers, as {"task/metric": value}."""
    return {
      f"{self.task}/{name}": value
      for name, value in self.metrics.items()
      if isinstance(value, float)
    }


class TaskEvaluation:
  """Evaluates checkpoints of a run on the tasks of EVAL_TASKS."""

  def __init__(
    self,
    model_dir: str,
    config: Config,
    vocabulary: Vocabulary,
    tasks: Sequence[EvalTask],
    assertions: Assertions,
    subfolder: str = "",
  ):
    """If CLEAN_SUBSET is True, finds the clean examples of `tasks`.

    Results are written to `subfolder` of the run's evaluations.
    `config` must not have ACTIVATION_DTYPE "auto": answers depend on the dtype.
    """
    self._folder = os.path.join(ModelDir(model_dir).evaluations, subfolder)
    self._config, self._vocabulary = config, vocabulary
    self._tasks, self._assertions = tasks, assertions
    self._clean: dict[str, list[int]] = {}
    if config.evaluation.clean_subset:
      self._clean = find_clean_examples(model_dir, config, self._tasks)
    # Everything that answers depend on, except the checkpoint and the examples.
    self._depends_on = {
      "vocabulary": vocabulary.sha256,
      **select_settings(config),
      **describe_index(config.decode),
    }

  def evaluate(
    self, checkpoint: Checkpoint, answered: Callable[[], None] = lambda: None
  ) -> Iterator[TaskOutcome]:
    """Writes the files of each task, and then yields the task's outcome.

    Calls `answered` after each answer of the model, and each check of it.

    Raises UserError if a task's code fails, or the disk is full.
    """
    step = checkpoint.manifest.step
    with CheckpointModel(checkpoint, self._config, self._vocabulary) as model:
      for task in self._tasks:
        # Quote the file's name, because a split may be "validation[:10%]".
        name = urllib.parse.quote(f"{task.name}-{task.split}", safe="")
        path = os.path.join(self._folder, step_name(step), name)
        depends_on = {
          "checkpoint": checkpoint.blake2b,
          "examples": task.fingerprint,
          "within_document": task.within_document,
          "end_ids": self._vocabulary.end_ids,
          **self._depends_on,
        }
        journal = AnswerJournal(f"{path}.answers.jsonl", depends_on, answered)
        with journal:
          answers = TaskAnswers(
            task.inputs, task.targets, model, journal, task.within_document
          )
          clean = self._clean.get(task.name)
          result = task.evaluate(step, answers, clean)
          scores, decode = journal.known("score"), self._vocabulary.decode
          examples = [
            Example(decode(task.inputs[i]), text, [scores.get(i)])
            for i, texts in journal.known("prediction").items()
            for text in texts
          ]
          flagged = self._assertions.count(examples, step, answered)
        outcome = TaskOutcome(
          step=step,
          checkpoint=checkpoint.path,
          task=task.name,
          split=task.split,
          activation_dtype=self._config.model.activation_dtype,
          num_examples=len(task.targets),
          num_cut=answers.num_cut,
          metrics=result.metrics | flagged,
          num_clean=None if clean is None else len(clean),
          categories=result.categories,
        )
        self._write(path, task, outcome, result)
        yield outcome

  def _write(
    self, path: str, task: EvalTask, outcome: TaskOutcome, result: TaskResult
  ) -> None:
    if outcome.num_cut:
      _logger.warning(
        f"{task.name}: the inputs of {outcome.num_cut:,} of "
        f"{outcome.num_examples:,} examples were too long and lost their "
        "beginning"
      )
    # Call _to_json in user_code, because repr() of a user's object may fail.
    with user_code(f"EVAL_TASKS: what {task.name}'s postprocessor returns"):
      write_json_lines(f"{path}.jsonl", result.records, _to_json)
    content = json_text(dataclasses.asdict(outcome), indent=1).encode()
    file = pathlib.Path(f"{path}.json")
    if file.exists() and file.read_bytes() == content:
      return  # TensorBoard would show these numbers twice
    write_atomically(f"{path}.json", content)
    self._events.write(outcome.step, outcome.numbers)

  @functools.cached_property
  def _events(self) -> EventsWriter:
    return EventsWriter(self._folder)


def _to_json(value: object) -> object:
  """Returns a JSON value for an object whose type JSON lacks."""
  if isinstance(value, (np.ndarray, np.generic)):
    return value.tolist()
  if isinstance(value, bytes):
    return value.decode("utf-8", "replace")
  return repr(value)
