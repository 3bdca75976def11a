# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Changes of a model's output before a task's postprocessor reads it."""

import functools
import re
from collections.abc import Callable
from typing import Any


def changed_outputs(
  postprocess: Callable | None, change: Callable[[str], str]
) -> Callable:
  """Returns a postprocessor of outputs that are changed first.

  Args:
    postprocess: postprocessor of a `seqio.Task`, or None; changes that it
      already makes are made before this one.
    change: function of the output of a model; targets do not go through it.
  """
  if (
    isinstance(postprocess, functools.partial) and postprocess.func is _changed
  ):
    earlier, postprocess = postprocess.args
    return functools.partial(
      _changed, lambda output: change(earlier(output)), postprocess
    )
  return functools.partial(_changed, change, postprocess)


def _changed(
  change: Callable[[str], str],
  postprocess: Callable | None,
  output: Any,
  *,
  is_target: bool = False,
  **keywords: Any,
) -> Any:
  if not is_target and isinstance(output, str):
    output = change(output)
  elif not is_target and isinstance(output, list):  # several samples
    output = [change(text) for text in output]
  if postprocess is None:
    return output
  return postprocess(output, is_target=is_target, **keywords)


def answer_finder(pattern: str) -> Callable[[str], str]:
  """Returns a function that finds the answer in an output.

  Args:
    pattern: regular expression with one group, which is the answer. The first
      match counts; an output without one has the answer "".
  """

  def find(output: str) -> str:
    match = re.search(pattern, output)
    return (match[1] or "") if match else ""

  return find
