# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes SeqIO's evaluator for a task, with the vocabulary of a run."""

import dataclasses
import functools
import inspect
import logging
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.config import TaskEvalConfig
from palm_mtf.data.sources.seqio_task import (
  function_name,
  name_step_errors,
  type_name,
)
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError
from palm_mtf.user_code import user_code

# Import seqio after palm_mtf._tf, which silences TensorFlow's notices.
import seqio  # isort: skip


def make_evaluator(
  task: seqio.Task,
  vocabulary: Vocabulary,
  config: TaskEvalConfig,
  sequence_length: int,
) -> seqio.Evaluator:
  """Returns an evaluator that has read the examples of `task`.

  The evaluator uses the run's `vocabulary`. Its only logger keeps postprocessed
  targets and outputs.
  """
  # Pass sequence lengths only if a preprocessor requires lengths, because with
  # lengths, SeqIO truncates features at their end. Without lengths, answers.py
  # truncates inputs at their beginning.
  lengths = None
  for step in task.preprocessors:
    parameter = inspect.signature(step).parameters.get("sequence_length")
    if parameter and parameter.default is inspect.Parameter.empty:
      lengths = dict.fromkeys(task.output_features, sequence_length)
  # Replace the task's vocabulary without loading it.
  own = _RunVocabulary(vocabulary)
  features = {
    name: feature
    if isinstance(feature.vocabulary, seqio.PassThroughVocabulary)
    else dataclasses.replace(feature, vocabulary=own)
    for name, feature in task.output_features.items()
  }
  # seqio.Evaluator finds only registered tasks.
  name = f"palm_mtf_evaluates:{task.name}"
  seqio.TaskRegistry.add_provider(name, task.replace(output_features=features))
  try:
    return seqio.Evaluator(
      name,
      _Unconverted(),
      eval_split=config.eval_split,
      sequence_length=lengths,
      num_examples=config.eval_examples,
      logger_cls=[KeptOutputs],
      log_dir=".",
      async_compute_metrics=False,
    )
  finally:
    seqio.TaskRegistry.remove(name)


class _RunVocabulary(seqio.Vocabulary):
  """The run's vocabulary with the methods of a SeqIO vocabulary."""

  def __init__(self, vocabulary: Vocabulary):
    super().__init__()
    self._own = vocabulary

  @property
  def eos_id(self) -> int:
    return self._own.eod_id

  @property
  def unk_id(self) -> None:
    return None

  @property
  def _base_vocab_size(self) -> int:
    return self._own.size

  def _encode(self, s: str) -> list[int]:
    return self._own.encode(s)

  def _decode(self, ids: Sequence[int]) -> str:
    return self._own.decode(ids)

  def _encode_tf(self, s: tf.Tensor) -> tf.Tensor:
    def encode(text: bytes) -> np.ndarray:
      (ids,) = self._own.encode_arrays([text.decode("utf-8")], 1)
      return ids.astype(np.int32)

    ids = tf.numpy_function(encode, [s], tf.int32, stateful=False)
    ids.set_shape([None])
    return ids

  def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
    def decode(ids: np.ndarray) -> bytes:
      return self._own.decode(ids).encode()

    text = tf.numpy_function(decode, [ids], tf.string, stateful=False)
    text.set_shape([])
    return text


class _Unconverted(seqio.PassThroughFeatureConverter):
  """A converter that changes nothing; seqio.Evaluator requires a converter."""

  TASK_FEATURES = MODEL_FEATURES = PACKING_FEATURE_DTYPES = {}  # noqa: RUF012
  pack = False


class KeptOutputs(seqio.loggers.Logger):
  """A SeqIO logger that keeps targets and outputs, to be written to a file."""

  def __init__(self, output_dir: str):
    super().__init__(output_dir)
    self.targets: Sequence[Any] | None = None
    self.inferences: dict[str, Any] = {}

  def __call__(self, *, targets=None, inferences=None, **unused: object):
    """Stores the targets and inferences that the task's postprocessor made."""
    self.targets, self.inferences = targets, inferences or {}


# SeqIO logs each error that it raises. Commands print it, so drop the record.
logging.getLogger("absl").addFilter(
  lambda record: record.msg != "Failed to evaluate task %s: %s"
)


def name_errors(task: seqio.Task, where: str) -> seqio.Task:
  """Returns a copy of a task whose errors name the function that failed.

  `where` begins the messages, for example "EVAL_TASKS: my_task".
  """
  changes = {
    "metric_fns": [_wrap_metric(x, where) for x in task.metric_fns],
    "preprocessors": [
      step
      if isinstance(step, seqio.CacheDatasetPlaceholder)
      else name_step_errors(step, where)
      for step in task.preprocessors
    ],
  }
  if function := task.postprocessor:
    name = f"{where}: postprocessor {function_name(function)}"
    changes["postprocess_fn"] = user_code(name)(function)
  return task.replace(**changes)


def simplify_metrics(metrics: Any, where: str) -> dict[str, float | str]:
  """Converts a metric function's result to {name: number or text}.

  None, the value of a metric that cannot be computed, becomes NaN. A histogram,
  image, audio or raw tensor becomes a text that describes its array.

  Raises UserError if `metrics` is not a dict of such values, or two names are
  equal or cannot be printed; `where` begins the message.
  """
  if not isinstance(metrics, Mapping):
    raise UserError(
      f"{where} returns {type_name(metrics)}; return a dict of numbers by name."
    )
  simple: dict[str, float | str] = {}
  for key, value in metrics.items():
    name = str(key)
    if not name.isprintable() or name in simple:
      raise UserError(
        f"{where}: {key!r}: give each metric another name, of printable "
        "characters."
      )
    simple[name] = _simplify(value, f"{where}: {name!r}")
  return simple


def _simplify(value: Any, where: str) -> float | str:
  kinds = seqio.metrics
  while isinstance(value, kinds.Scalar | kinds.Text):
    value = next(iter(vars(value).values()))  # the first field: number or text
  if isinstance(value, kinds.MetricValue) and vars(value):
    return _describe(value)
  if value is None or (np.ma.is_masked(value) and value.size == 1):
    return math.nan
  item = value
  if hasattr(value, "__array__"):
    array = np.asarray(value)
    if array.size == 1:  # a number of any library, or an array of one number
      item = array.reshape([])[()]
  if isinstance(item, bytes):
    item = item.decode("utf-8", "replace")
  if isinstance(item, str):
    return str(item)
  is_number = isinstance(item, numbers.Real | Decimal | np.bool_) or (
    getattr(item, "dtype", None) == tf.bfloat16.as_numpy_dtype
  )
  try:
    if is_number:
      return float(item)
  except OverflowError:  # an int beyond the largest float
    return math.inf if item > 0 else -math.inf
  except (TypeError, ValueError):  # float() refuses times and signalling NaNs
    pass
  raise UserError(
    f"{where} is {type_name(value)}; return a number or a text for each name."
  )


def _describe(value: seqio.metrics.MetricValue) -> str:
  """Describes an array, as in "Histogram of 12 values from 0.5 to 3"."""
  data = np.asarray(next(iter(vars(value).values())))  # the first field: array
  bounds = ""
  if data.size and data.dtype.kind in "biuf":
    bounds = f" from {float(data.min()):g} to {float(data.max()):g}"
  return f"{type(value).__name__} of {data.size:,} values{bounds}"


def _wrap_metric(function: Callable, where: str) -> Callable:
  where = f"{where}: metric function {function_name(function)}"

  # SeqIO passes values by parameter name, so `wraps` must preserve the names.
  @user_code(where)
  @functools.wraps(function)
  def metric(*arguments: Any, **keywords: Any) -> Mapping[str, Any]:
    return simplify_metrics(function(*arguments, **keywords), where)

  return metric
