# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tasks as the user's protocol asks them: exemplars, header, answer pattern."""

import logging
from collections.abc import Collection
from typing import Any

from palm_mtf.config.evaluation import TaskEvalConfig
from palm_mtf.data.sources.seqio_task import find_provider
from palm_mtf.errors import UserError
from palm_mtf.evaluation.few_shot import few_shot_form
from palm_mtf.evaluation.outputs import answer_finder, changed_outputs

_logger = logging.getLogger(__name__)


def with_protocol(task: Any, config: TaskEvalConfig) -> Any:
  """Returns a `seqio.Task` in the form that its name has in the settings.

  Args:
    task: a registered task.
    config: settings of the evaluation.

  Raises:
    UserError: a setting does not suit the task.
  """
  name = task.name
  if config.few_shot.changes(name):
    task = few_shot_form(task, config.few_shot)
  pattern = (config.answer_patterns or {}).get(name)
  if pattern:
    if all(x.model_output_type.name == "SCORE" for x in task.metric_objs):
      raise UserError(
        f"ANSWER_PATTERNS: {name} compares likelihoods and has no output to "
        "search; leave it out."
      )
    task = task.replace(
      postprocess_fn=changed_outputs(task.postprocessor, answer_finder(pattern))
    )
  return task


def check_names(config: TaskEvalConfig, evaluated: Collection[str]) -> None:
  """Raises UserError if a setting names a task that is not registered.

  Args:
    config: settings of the evaluation.
    evaluated: names of the tasks of EVAL_TASKS, those of mixtures one by one.
  """
  for macro, by_task in {
    "EXEMPLAR_FILES": config.few_shot.exemplar_files,
    "PROMPT_HEADERS": config.few_shot.prompt_headers,
    "ANSWER_PATTERNS": config.answer_patterns,
    "CATEGORY_GROUPS": config.category_groups,
  }.items():
    for name in by_task or ():
      if name not in evaluated:
        find_provider(name, macro)
        _logger.warning(
          f"{macro}: {name} is no task of EVAL_TASKS, and its setting is "
          "not used"
        )
