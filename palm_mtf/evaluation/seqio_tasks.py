# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluates a model's answers to SeqIO tasks with seqio.Evaluator.

Inputs and targets are ids of the run's vocabulary, as in training. If the task
appends an EOS, targets end in the id of [eod], which is scored too. The task's
postprocessor and metric functions compute metrics from `TaskAnswers`.
"""

import functools
import hashlib
import itertools
import logging
from collections.abc import (
  Callable,
  Hashable,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
from typing import Any, NamedTuple

import numpy as np

from palm_mtf._tf import eager_mode
from palm_mtf.config import TaskEvalConfig
from palm_mtf.data.sources.document import Document
from palm_mtf.data.sources.seqio_task import check_ids, find_provider, tokenizes
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError, did_you_mean
from palm_mtf.evaluation.answers import TaskAnswers
from palm_mtf.evaluation.few_shot import (
  adds_exemplars,
  apply_protocol,
  check_names,
)
from palm_mtf.evaluation.seqio_evaluator import (
  KeptOutputs,
  make_evaluator,
  name_errors,
  simplify_metrics,
)
from palm_mtf.user_code import user_code

# Import seqio after palm_mtf._tf, which silences TensorFlow's notices.
import seqio  # isort: skip

_logger = logging.getLogger(__name__)

_Output = seqio.metrics.ModelOutputType
_PREDICTS = {_Output.PREDICTION, _Output.PREDICTION_WITH_AUX}


class TaskResult(NamedTuple):
  """A model's metrics on a task, and the examples with the model's answers."""

  metrics: dict[str, float | str]  # {name: number or text}
  categories: dict[str, dict[str, float]]  # {category: {name: number}}
  records: list[dict]  # inputs, targets and answers of each example


def open_eval_tasks(
  config: TaskEvalConfig, vocabulary: Vocabulary, sequence_length: int
) -> list["EvalTask"]:
  """Returns the tasks in EVAL_TASKS, and the tasks of mixtures in EVAL_TASKS.

  Raises UserError if a task does not exist, lacks the split EVAL_SPLIT, metric
  functions or examples, or if code of SeqIO or the task fails.
  """
  found: dict[str, EvalTask] = {}
  providers = {x: find_provider(x, "EVAL_TASKS") for x in config.eval_tasks}
  subtasks = map(seqio.get_subtasks, providers.values())
  check_names(config, {task.name for each in subtasks for task in each})
  for name, provider in providers.items():
    # `provider` is a task or a mixture. Skip the tasks of a mixture that cannot
    # be evaluated; if no task is left, raise an error.
    problems = []
    for task in seqio.get_subtasks(provider):
      problem = _find_problem(task, config.eval_split)
      if problem:
        problems.append(problem)
      elif task.name not in found:
        found[task.name] = EvalTask(
          apply_protocol(task, config),
          config,
          vocabulary,
          sequence_length,
          groups=(config.category_groups or {}).get(task.name, {}),
        )
    if len(problems) == len(seqio.get_subtasks(provider)):
      raise UserError(f"EVAL_TASKS = {name!r}: {problems[0]}")
    for problem in problems:
      _logger.warning(f"EVAL_TASKS: left out of {name}: {problem}")
  return list(found.values())


def _find_problem(task: seqio.Task, split: str) -> str:
  """Returns why a task cannot be evaluated, or "" if it can be."""
  with user_code(f"EVAL_TASKS: the splits of {task.name}"):
    splits = list(task.splits)
  with user_code(f"EVAL_TASKS: the metric functions of {task.name}"):
    has_metrics = bool(task.metric_objs)
  if split not in splits:
    return (
      f"{task.name} has no split {split!r}, only "
      f"{', '.join(map(repr, splits))}; set EVAL_SPLIT to one of them."
    )
  if not has_metrics:
    return (
      f"{task.name} has no metric functions; give its registration some "
      "(metric_fns), or another task."
    )
  return ""


class EvalTask:
  """A SeqIO task to evaluate, and its examples."""

  def __init__(
    self,
    task: seqio.Task,
    config: TaskEvalConfig,
    vocabulary: Vocabulary,
    sequence_length: int,
    groups: Mapping[str, Sequence[str]] | None = None,
  ):
    """Reads and tokenizes the task's examples.

    Args:
      vocabulary: vocabulary of the run, which replaces the task's vocabulary.
      sequence_length: length for preprocessors that require a sequence length.
      groups: {group: categories}, the entry of the task in CATEGORY_GROUPS.

    Raises:
      UserError: if the task's code fails, an example is missing or invalid,
        token ids are from another vocabulary, or the model cannot provide the
        outputs that a metric needs.
    """
    self._groups = groups or {}
    self._warned: set[str] = set()  # to say once why a metric is left out
    self.name, self.split = task.name, config.eval_split
    self._task, self._config = task, config
    self._sequence_length = sequence_length
    self._vocabulary = vocabulary
    self._what = f"EVAL_TASKS: {task.name}, split {self.split!r}"
    self._outputs = {each.model_output_type for each in task.metric_objs}
    if _Output.SCORE_WITH_INTERMEDIATES in self._outputs:
      raise UserError(
        f"{self._what}: a metric needs scores with intermediates, which this "
        "model does not provide; use scores."
      )
    # A task without `tokenize` makes token ids itself. The vocabulary that made
    # the ids must equal the vocabulary of the run.
    if not tokenizes(task):
      names = {"inputs", "targets"} & set(task.output_features)
      check_ids(task, sorted(names), vocabulary.sha256, "EVAL_TASKS")
    with user_code(self._what), eager_mode():
      task = name_errors(task, self._what)
      self._evaluator = make_evaluator(
        task, vocabulary, config, sequence_length
      )
      self._examples = list(
        self._evaluator.cached_task_datasets[task.name].as_numpy_iterator()
      )
    if not self._examples:
      raise UserError(f"{self._what}: there are no examples.")
    self._set_ids()
    # Whether all inputs are from the middle of a document, not its beginning.
    # Then another start token stands before them, as in training.
    self.within_document = all(
      bool(example.get("within_document", False)) for example in self._examples
    )
    self._categories = [category_of(example) for example in self._examples]
    if config.eval_examples is None:
      check_groups(self.name, self._groups, self._categories)
    if self._outputs & _PREDICTS and not all(self.inputs):
      number = [*map(bool, self.inputs)].index(False)
      raise UserError(
        f"{self._what}: example {number:,} has no inputs; there has to be a "
        "text to continue."
      )

  def _set_ids(self):
    digest = hashlib.blake2b(digest_size=16)
    # Token ids, [examples][tokens]; [] if an example lacks the feature.
    self.inputs, self.targets = [], []
    for number, example in enumerate(self._examples):
      for name, ids in (("inputs", self.inputs), ("targets", self.targets)):
        value = np.asarray(example.get(name, []))
        if value.ndim != 1 or (len(value) and value.dtype.kind not in "iu"):
          raise UserError(
            f"{self._what}: {name!r} of example {number:,} are not the ids of "
            "one text; end the task's steps in `tokenize`."
          )
        ids.append(value.tolist())
        digest.update(f"{ids[-1]}".encode())
    # Hash of all examples. If it changes, stored answers are not used again.
    self.fingerprint = digest.hexdigest()

  @functools.cached_property
  def texts(self) -> list[Document]:
    """Each example's text without exemplars, to look for it in training data.

    It is "" for an "unconditional" example, which scores an answer option
    without its question: an option by itself identifies no example.
    """
    task, steps = self, self._task.preprocessors
    if any(map(adds_exemplars, steps)):
      others = itertools.filterfalse(adds_exemplars, steps)
      task = EvalTask(
        self._task.replace(preprocessors=[*others]),
        self._config,
        self._vocabulary,
        self._sequence_length,
      )
    texts = [
      {} if example.get("unconditional", False) else self._read_texts(example)
      for example in task._examples
    ]
    return [Document(x.get("targets", ""), x.get("inputs")) for x in texts]

  @property
  def questions(self) -> list[Hashable]:
    """A key per example, equal for all options of a question, to group them."""
    return [_find_question(x, n) for n, x in enumerate(self._examples)]

  def evaluate(
    self, step: int, answers: TaskAnswers, clean: Sequence[int] | None = None
  ) -> TaskResult:
    """Computes the task's metrics from a model's answers.

    `clean` has the indices of the examples that the training text does not
    contain, for the metrics "<metric>_clean"; None to omit these metrics.

    Raises UserError if a metric function or a postprocessor of the task fails.
    """
    # Compute the answers outside the user_code block, so that an error of the
    # model is not reported as an error of the task's code.
    predicted, scores, scored = [], [], []
    if self._outputs & _PREDICTS:
      predicted = [*enumerate(self._encode(answers.predictions()))]
    if _Output.PREDICTION_WITH_AUX in self._outputs:
      scores = answers.prediction_scores()
      if all(len(each) == 1 for each in scores):
        scores = [each[0] for each in scores]
    if _Output.SCORE in self._outputs:
      scored = [*enumerate(answers.scores())]
    with user_code(self._what), eager_mode():
      results, outputs = self._evaluator.evaluate(
        compute_metrics=True,
        step=step,
        predict_fn=lambda dataset: predicted,
        score_fn=lambda dataset: scored,
        predict_with_aux_fn=lambda dataset: (predicted, {"scores": scores}),
      )
      (kept,) = self._evaluator.loggers  # it keeps postprocessed outputs
      metrics_of = functools.partial(
        self._compute_metrics, outputs[self._evaluator.eval_tasks[0].name]
      )
      metrics = simplify_metrics(results.result()[self.name], self._what)
      averages, categories = group_metrics(
        metrics_of, self._categories, self._groups
      )
      self._add(metrics, averages)
      if clean is not None:
        self._add(
          metrics, self._compute_clean_metrics(metrics, metrics_of, clean)
        )
      records = list(self._make_records(kept))
      if clean is not None:
        is_clean = set(clean)
        for number, record in enumerate(records):
          record["contaminated"] = number not in is_clean
    return TaskResult(metrics, categories, records)

  def _add(
    self, metrics: dict[str, float | str], others: Mapping[str, float]
  ) -> None:
    """Adds palm_mtf's metrics, `others`, unless the task has equal names."""
    if both := metrics.keys() & others.keys():
      _logger.warning(
        f"{self._what}: its own {', '.join(sorted(both))} stand for what "
        "palm_mtf computes under these names"
      )
    metrics |= {n: x for n, x in others.items() if n not in metrics}

  def _compute_clean_metrics(
    self,
    whole: Mapping[str, float | str],
    metrics_of: Callable[[Sequence[int]], dict[str, float]],
    clean: Sequence[int],
  ) -> dict[str, float]:
    found = {n: x for n, x in whole.items() if isinstance(x, float)}
    if not clean:  # metric functions fail without examples
      return {}
    if len(clean) < len(self._examples):
      averages, _ = group_metrics(
        lambda numbers: metrics_of([clean[number] for number in numbers]),
        [self._categories[number] for number in clean],
        self._groups,
      )
      found = metrics_of(clean) | averages
    return {f"{name}_clean": value for name, value in found.items()}

  def _compute_metrics(
    self, outputs: Mapping[_Output, Any], numbers: Sequence[int]
  ) -> dict[str, float]:
    """Returns the numeric metrics over the examples with indices `numbers`."""

    def pick(values: Sequence[Any]) -> np.ndarray:
      return np.array([values[number] for number in numbers])

    (task,) = self._evaluator.eval_tasks
    examples = [self._examples[number] for number in numbers]
    features = task.output_features
    found = {}
    for metric in task.metric_objs:
      output = outputs[metric.model_output_type]
      if isinstance(output, tuple):  # (predictions, {name: values})
        predictions, named = output
        picked = pick(predictions), {n: pick(x) for n, x in named.items()}
      else:
        picked = pick(output)
      try:
        with user_code(self._what):
          values = metric.from_model_output(
            examples, picked, features, "targets"
          )
          if isinstance(values, seqio.metrics.CollectingMetric):
            computed, _ = values.actual_compute(
              examples, features, "targets", None
            )
          else:
            computed = values.compute()
          found |= computed
      except UserError as error:
        if str(error) not in self._warned:
          self._warned.add(str(error))
          _logger.warning(f"metrics of some examples are left out: {error}")
    plain = simplify_metrics(found, self._what)
    return {n: x for n, x in plain.items() if isinstance(x, float)}

  def _encode(self, predictions: Sequence[Sequence[str]]) -> np.ndarray:
    """Encodes predictions, because seqio.Evaluator takes and decodes token ids.

    Returns int32 ids, padded with [eod]: [examples, tokens] if each example has
    one text, otherwise [examples, samples, tokens].
    """
    eod = self._vocabulary.eod_id
    flat = [text for texts in predictions for text in texts]
    ids = self._vocabulary.encode_batch(flat)
    padded = np.full([len(ids), max(map(len, ids)) + 1], eod, np.int32)
    for row, each in zip(padded, ids, strict=True):
      row[: len(each)] = each
    samples = len(predictions[0])
    if samples == 1:
      return padded
    return padded.reshape([-1, samples, padded.shape[1]])

  def _make_records(self, kept: KeptOutputs) -> Iterator[dict]:
    for number, example in enumerate(self._examples):
      record: dict[str, Any] = self._read_texts(example)
      # Record what the task's postprocessor made of the targets and outputs.
      if kept.targets is not None:
        record["expected"] = kept.targets[number]
      for name, values in kept.inferences.items():
        if isinstance(values, dict):  # SeqIO's "aux_value": {name: values}
          record[name] = {x: each[number] for x, each in values.items()}
        else:
          record[name] = values[number]
      yield record

  def _read_texts(self, example: dict[str, Any]) -> dict[str, str]:
    # Returns the texts of the inputs and targets that an example has, by name.
    found = {}
    for name in [x for x in ("inputs", "targets") if x in example]:
      text = example.get(f"{name}_pretokenized")
      is_text = isinstance(text, bytes)
      decode = self._vocabulary.decode
      found[name] = (
        text.decode("utf-8", "replace") if is_text else decode(example[name])
      )
    return found


def _find_question(example: dict[str, Any], number: int) -> Hashable:
  """Returns a key for a question; `number` if the question has no options."""
  if "record" in example:  # a feature of the tasks in palm_mtf.tasks
    return example["record"]
  # In T5's tasks, `idx` holds the indices of the question and of the option.
  index = np.asarray(example.get("idx", []))
  return tuple(index[:-1]) if index.shape and len(index) > 1 else number


Metrics = dict[str, float]


def category_of(example: Mapping[str, Any]) -> str:
  """Returns the category of an example, or "" if it has none."""
  value = example.get("exemplar_group", b"")
  return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""


def check_groups(
  task: str, groups: Mapping[str, Iterable[str]], categories: Iterable[str]
) -> None:
  """Raises UserError if a category in `groups` is not in `categories`.

  `groups` is {group: categories}, the entry of `task` in CATEGORY_GROUPS.
  """
  known = {*categories}
  for group, names in groups.items():
    for name in names:
      if name not in known:
        raise UserError(
          f"CATEGORY_GROUPS: {name!r} in {group!r} is not a category of {task}"
          f"{did_you_mean(name, known)}; correct or remove it."
        )


def group_metrics(
  metrics_of: Callable[[Sequence[int]], Metrics],
  categories: Sequence[str],
  groups: Mapping[str, Iterable[str]],
) -> tuple[Metrics, dict[str, Metrics]]:
  """Computes metrics by category and by group of categories.

  Args:
    metrics_of: function from indices of examples to metrics of these examples.
    categories: category of each example, [examples].
    groups: {group: categories}; categories without an example are ignored.

  Returns:
    Two dicts, both empty if there are fewer than 2 categories. The first has
    macro_<metric>, the mean of a metric over all categories. For each group, it
    also has <metric>/<group>, the metric of all examples of the group, and
    macro_<metric>/<group>, the mean over the group's categories. The second
    dict maps each category to its metrics.
  """
  places: dict[str, list[int]] = {}
  for number, category in enumerate(categories):
    places.setdefault(category, []).append(number)
  if len(places) < 2:
    return {}, {}
  of_each = {name: metrics_of(places[name]) for name in sorted(places)}
  averages = _average(of_each.values(), "")
  for group, names in groups.items():
    inside = [name for name in dict.fromkeys(names) if name in places]
    numbers = sorted(number for name in inside for number in places[name])
    if numbers:
      for name, value in metrics_of(numbers).items():
        averages[f"{name}/{group}"] = value
      averages |= _average([of_each[name] for name in inside], f"/{group}")
  return averages, of_each


def _average(of_each: Iterable[Metrics], end: str) -> Metrics:
  every = list(of_each)
  return {
    f"macro_{name}{end}": float(np.mean([each[name] for each in every]))
    for name in every[0]
    if all(name in each for each in every)
  }
