# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The functions of a task: their errors name them, their values are checked."""

import functools
import logging
import math
import numbers
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.data.sources.seqio_steps import (
  function_name,
  named_step,
  type_name,
)
from palm_mtf.errors import UserError
from palm_mtf.user_code import user_code

# After TensorFlow, which _tf.py keeps silent.
import seqio  # isort: skip

# What SeqIO logs of an error that it raises: commands print the error.
logging.getLogger("absl").addFilter(
  lambda record: record.msg != "Failed to evaluate task %s: %s"
)


def with_named_errors(task: seqio.Task, where: str) -> seqio.Task:
  """Returns a task whose errors name its function at fault.

  Args:
    task: task to evaluate.
    where: beginning of the errors, such as "EVAL_TASKS: my_task".
  """
  changes = {
    "metric_fns": [_metric(x, where) for x in task.metric_fns],
    "preprocessors": [
      step
      if isinstance(step, seqio.CacheDatasetPlaceholder)
      else named_step(step, where)
      for step in task.preprocessors
    ],
  }
  if task.postprocessor:
    changes["postprocess_fn"] = _postprocessor(task.postprocessor, where)
  return task.replace(**changes)


def plain_metrics(
  metrics: Any, where: str
) -> dict[str, float | str | seqio.metrics.MetricValue]:
  """Returns metrics as numbers and texts by name; histograms stay.

  None is NaN: a metric that cannot be computed.

  Args:
    metrics: what a metric function returns.
    where: beginning of errors.

  Raises:
    UserError: it is no dict, or a value is neither a number nor a text.
  """
  if not isinstance(metrics, Mapping):
    raise UserError(
      f"{where} returns {type_name(metrics)}; return a dict of numbers by name."
    )
  return {str(n): _plain(x, f"{where}: {n!r}") for n, x in metrics.items()}


def _plain(value: Any, where: str) -> float | str | seqio.metrics.MetricValue:
  if isinstance(value, seqio.metrics.Scalar):
    value = value.value
  elif isinstance(value, seqio.metrics.Text):
    value = value.textdata
  elif isinstance(value, seqio.metrics.MetricValue):
    return value
  if value is None:
    return math.nan
  if isinstance(value, tf.Tensor):
    value = value.numpy()
  item = value
  if hasattr(value, "__array__"):
    array = np.asarray(value)
    if array.size == 1:  # a number of any library, also in an array of one
      item = array.reshape([])[()]
  if isinstance(item, bytes):
    item = item.decode("utf-8", "replace")
  if isinstance(item, str):
    return str(item)
  is_number = isinstance(item, numbers.Real | Decimal | np.bool_) or (
    getattr(item, "dtype", None) == tf.bfloat16.as_numpy_dtype
  )
  if not is_number:
    raise UserError(
      f"{where} is {type_name(value)}; return a number or a text for each name."
    )
  try:
    return float(item)
  except OverflowError:  # an int beyond the largest float
    return math.inf if item > 0 else -math.inf


def _metric(function: Callable, where: str) -> Callable:
  where = f"{where}: metric function {function_name(function)}"

  # SeqIO reads the names of the parameters, which `wraps` keeps.
  @functools.wraps(function)
  def metric(*arguments: Any, **keywords: Any) -> Mapping[str, Any]:
    with user_code(where):
      return plain_metrics(function(*arguments, **keywords), where)

  return metric


def _postprocessor(function: Callable, where: str) -> Callable:
  @functools.wraps(function)
  def postprocess(*arguments: Any, **keywords: Any) -> Any:
    with user_code(f"{where}: postprocessor {function_name(function)}"):
      return function(*arguments, **keywords)

  return postprocess
