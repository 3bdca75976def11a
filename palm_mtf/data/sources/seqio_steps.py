# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Splits a SeqIO task's preprocessors ("steps") at `tokenize`; runs steps."""

# seqio is imported in functions, because its import takes seconds. Each of them
# takes a task, so seqio has been imported by data/sources/seqio_task.py.

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from palm_mtf.errors import UserError
from palm_mtf.user_code import user_code


def split_at_tokenize(task: Any) -> tuple[list[Callable], list[Callable]]:
  """Returns the steps that make text, and the steps that encode this text.

  If no step is `tokenize`, or a step after `tokenize` changes token ids, the
  first list has all steps and the second list is empty.
  """
  import seqio

  steps = [
    step
    for step in task.preprocessors
    if not isinstance(step, seqio.CacheDatasetPlaceholder)
  ]
  kinds = seqio.preprocessors
  first = next((i for i, x in enumerate(steps) if _encodes(x)), None)
  # Split only if all later steps add EOS. After other steps, such as T5's
  # split_tokens, the ids are no longer those of the text.
  if first is not None and all(
    _is_one_of(later, kinds.append_eos, kinds.append_eos_after_trim)
    for later in steps[first + 1 :]
  ):
    return steps[:first], steps[first:]
  return steps, []


def apply_steps(
  task: Any,
  steps: Iterable[Callable],
  *,
  split: str,
  where: str,
  sequence_length: Mapping[str, int] | None = None,
) -> Any:
  """Returns the tf.data.Dataset that `steps` make from a split, in file order.

  Args:
    where: beginning of error messages, which names the task.
    sequence_length: maps a feature to its number of tokens, for steps that
      truncate token ids.
  """
  import seqio

  with seqio.map_seed_manager(0):  # random steps get the same seeds every time
    dataset = task.source.get_dataset(split=split, shuffle=False)
    for step in steps:
      dataset = seqio.add_kwargs_to_transform(
        name_step_errors(step, where),
        sequence_length=sequence_length,
        output_features=task.output_features,
      )(dataset)
  return dataset


def read_examples(dataset: Any, where: str) -> Iterator[dict[str, Any]]:
  """Yields the elements of a tf.data.Dataset as NumPy values.

  Raises:
    UserError: a preprocessor fails; the message begins with `where`.
  """
  with user_code(where):
    examples = dataset.as_numpy_iterator()
  while True:
    with user_code(where):
      example = next(examples, None)
    if example is None:
      return
    yield example


def name_step_errors(step: Callable, where: str) -> Callable:
  """Wraps `step` so that its errors begin with `where` and the step's name."""
  where = f"{where}: preprocessor {function_name(step)}"

  # `wraps` keeps the names of the parameters, which SeqIO inspects.
  @user_code(where)
  @functools.wraps(step)
  def named(*arguments: Any, **keywords: Any) -> Any:
    dataset = step(*arguments, **keywords)
    if not hasattr(dataset, "element_spec"):
      raise UserError(
        f"{where} returns {type_name(dataset)}; return a tf.data.Dataset."
      )
    return dataset

  return named


def function_name(function: Callable) -> str:
  """Returns the name of a function, a functools.partial or other callable."""
  while isinstance(function, functools.partial):
    function = function.func
  return getattr(function, "__qualname__", type(function).__name__)


def type_name(value: object) -> str:
  """Returns "None", or a value's type with an article, such as "a list"."""
  return "None" if value is None else f"a {type(value).__name__}"


def tokenizes(task: Any) -> bool:
  """Whether any step is SeqIO's `tokenize` or `tokenize_and_append_eos`."""
  return any(map(_encodes, task.preprocessors))


def _encodes(step: Callable) -> bool:
  import seqio

  kinds = seqio.preprocessors
  return _is_one_of(step, kinds.tokenize, kinds.tokenize_and_append_eos)


def _is_one_of(step: Callable, *functions: Callable) -> bool:
  return any(_unwrap(step) is _unwrap(each) for each in functions)


def _unwrap(function: Any) -> Any:
  """Returns the function inside partials and decorators, such as gin's."""
  while True:
    if isinstance(function, functools.partial):
      function = function.func
    elif hasattr(function, "__wrapped__"):
      function = function.__wrapped__
    else:
      return function


def kind_of_feature(spec: Any) -> str:
  """Returns "text" or "ids" for a tf.TensorSpec; else its dtype and rank."""
  if spec.dtype.name == "string" and spec.shape.rank == 0:
    return "text"
  if spec.dtype.is_integer and spec.shape.rank == 1:
    return "ids"
  return f"{spec.dtype.name} of rank {spec.shape.rank}"


def strip_eos(ids: np.ndarray, eos_id: int | None) -> np.ndarray:
  """Returns `ids` without a trailing EOS, [num_tokens], int32."""
  has_eos = len(ids) and ids[-1] == eos_id
  return np.asarray(ids[:-1] if has_eos else ids, np.int32)
