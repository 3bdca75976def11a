# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""PaLM's two averages over its 29 English tasks (6.1, Table 4).

Avg NLG is the mean of nine numbers of eight tasks: SQuAD v2 counts twice, by F1
and by exact match. Avg NLU is that of the other 21 tasks, each its accuracy but
for MultiRC (F1a). The published ones are 1-shot: they are those of
few_shot_task("palm_english", 1).
"""

from collections.abc import Mapping

from palm_mtf.errors import UserError

# Which metric of a task counts, in the order of the paper's table.
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
NLU = (
  ("hellaswag", "accuracy"),
  ("story_cloze", "accuracy"),
  ("winograd", "accuracy"),
  ("winogrande", "accuracy"),
  ("race_middle", "accuracy"),
  ("race_high", "accuracy"),
  ("piqa", "accuracy"),
  ("arc_easy", "accuracy"),
  ("arc_challenge", "accuracy"),
  ("openbookqa", "accuracy"),
  ("boolq", "accuracy"),
  ("copa", "accuracy"),
  ("rte", "accuracy"),
  ("wic", "accuracy"),
  ("multirc", "f1a"),
  ("wsc", "accuracy"),
  ("record", "accuracy"),
  ("cb", "accuracy"),
  ("anli_r1", "accuracy"),
  ("anli_r2", "accuracy"),
  ("anli_r3", "accuracy"),
)


def palm_averages(
  results: Mapping[str, Mapping[str, float]],
) -> dict[str, float]:
  """Returns "Avg NLG" and "Avg NLU", in percent.

  Args:
    results: the metrics of each task, in percent; names may be those of the
      few-shot forms, such as "piqa_1_shot".

  Raises:
    UserError: results of a task or metric are missing, or of two forms of one.
  """
  of_task: dict[str, Mapping[str, float]] = {}
  for name, metrics in results.items():
    task = name.partition("_seed_")[0].removesuffix("_shot")
    if task != name:
      task = task.rpartition("_")[0]
    if task in of_task:
      raise UserError(
        f"results have two forms of {task}; give those of one number of shots."
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
