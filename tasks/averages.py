# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""PaLM's Avg NLG and Avg NLU over its 29 English tasks (6.1, Table 4)."""

# PaLM publishes 1-shot averages: evaluate few_shot_task("palm_english", 1).

import re
from collections.abc import Mapping

from palm_mtf.errors import UserError

# The metrics that enter the averages, in the order of the paper's table. NLG
# averages nine numbers from eight tasks: SQuAD v2 has both F1 and exact match.
NLG = (
  ("trivia_qa", "em"),
  ("natural_questions", "em"),
  ("web_questions", "em"),
  ("lambada", "sequence_accuracy"),
  ("drop", "f1"),
  ("coqa", "f1"),
  ("quac", "f1"),
  ("squad_v2", "f1"),
  ("squad_v2", "em"),
)
_NLU_TASKS = (
  "hellaswag story_cloze winograd winogrande race_middle race_high piqa "
  "arc_easy arc_challenge openbookqa boolq copa rte wic multirc wsc record cb "
  "anli_r1 anli_r2 anli_r3"
).split()
# F1a is the F1 of the answer "yes" over all questions of MultiRC.
NLU = tuple((x, "f1a" if x == "multirc" else "accuracy") for x in _NLU_TASKS)
# few_shot.py names a form "piqa_1_shot", "piqa_1_shot_seed_3", "piqa_custom".
_FORM = re.compile(r"(_\d+_shot(_seed_-?\d+)?)?(_custom)?$")


def palm_averages(
  results: Mapping[str, Mapping[str, float]],
) -> dict[str, float]:
  """Returns "Avg NLG" and "Avg NLU", in percent.

  Args:
    results: metrics in percent, by the name of a task or of its few-shot form,
      such as "piqa_1_shot".

  Raises:
    UserError: results of a task are missing, or given in two forms.
  """
  of_task: dict[str, Mapping[str, float]] = {}
  for name, metrics in results.items():
    task = _FORM.sub("", name)
    if task in of_task:
      raise UserError(
        f"results have two forms of {task}; give results for one number of "
        "shots."
      )
    of_task[task] = metrics
  missing = [
    f"{task} {metric}"
    for task, metric in NLG + NLU
    if metric not in of_task.get(task, {})
  ]
  if missing:
    raise UserError(
      f"PaLM's averages need all 29 tasks: {', '.join(missing)} missing."
    )
  return {
    f"Avg {kind}": sum(of_task[task][metric] for task, metric in pairs)
    / len(pairs)
    for kind, pairs in (("NLG", NLG), ("NLU", NLU))
  }
