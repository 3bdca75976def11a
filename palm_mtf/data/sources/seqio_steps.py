# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which preprocessors of a SeqIO task run, and what they make of an example.

What is done with them is in seqio_task.py.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np


def steps_to_run(task: Any, seqio: ModuleType) -> list[Callable]:
  """Returns the preprocessors that make the text, or else all of them."""
  steps = [
    step
    for step in task.preprocessors
    if not isinstance(step, seqio.CacheDatasetPlaceholder)
  ]
  kinds = seqio.preprocessors
  for i, step in enumerate(steps):
    if _is_one_of(step, kinds.tokenize, kinds.tokenize_and_append_eos):
      if all(
        _is_one_of(later, kinds.append_eos, kinds.append_eos_after_trim)
        for later in steps[i + 1 :]
      ):
        return steps[:i]
      break
  return steps


def tokenizes(task: Any, seqio: ModuleType) -> bool:
  """Whether a step of SeqIO encodes the task's text with its vocabulary."""
  kinds = seqio.preprocessors
  return any(
    _is_one_of(step, kinds.tokenize, kinds.tokenize_and_append_eos)
    for step in task.preprocessors
  )


def _is_one_of(step: Callable, *functions: Callable) -> bool:
  return any(_unwrapped(step) is _unwrapped(each) for each in functions)


def _unwrapped(function: Any) -> Any:
  """Returns what partial, functools.wraps and gin were put around."""
  while True:
    if isinstance(function, functools.partial):
      function = function.func
    elif hasattr(function, "__wrapped__"):
      function = function.__wrapped__
    else:
      return function


def kind(spec: Any) -> str:
  """Returns what a feature's tf.TensorSpec is: "text", "ids", or else."""
  if spec.dtype.name == "string" and spec.shape.rank == 0:
    return "text"
  if spec.dtype.is_integer and spec.shape.rank == 1:
    return "ids"
  return f"{spec.dtype.name} of rank {spec.shape.rank}"


def decode(content: bytes) -> str | None:
  """Returns the text, or None for what is not text."""
  try:
    return None if b"\0" in content else content.decode("utf-8")
  except UnicodeDecodeError:
    return None


def strip_eos(ids: np.ndarray, eos_id: int | None) -> np.ndarray:
  """Returns ids, [num_tokens], int32, without an EOS at the end."""
  has_eos = len(ids) and ids[-1] == eos_id
  return np.asarray(ids[:-1] if has_eos else ids, np.int32)
