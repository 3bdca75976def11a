# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""SeqIO tasks of PaLM's evaluation: 29 English tasks, MMLU and GSM8K.

from palm_mtf.tasks import fewshot
from palm_mtf.tasks import records
records.places.folder = "/data/sets"
fewshot.normalization.piqa = "characters"     # instead of the table's
"""

# Each row of TASKS is registered twice: "piqa" has no exemplars, "piqa_5_shot"
# has PaLM's number of exemplars. Mixtures `palm_english` and
# `palm_english_few_shot` hold the 29 tasks; averages.py averages their results.

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import gin
import seqio

from palm_mtf.evaluation.few_shot import few_shot_task
from palm_mtf.tasks import prompts
from palm_mtf.tasks.quac import quac
from palm_mtf.tasks.questions import (
  Option,
  add_choices,
  add_questions,
  check_t5,
  choices,
  t5_metric,
)
from palm_mtf.tasks.records import RecordSource

# "validation" is the split that papers report: the test set if it has labels.
_USUAL = {"train": "train", "validation": "validation"}
_TESTED = {"train": "train", "validation": "test"}


class Scored(NamedTuple):
  """A task with options, compared by one of questions.NORMALIZATIONS."""

  dataset: str
  version: str | None
  prompt: Callable
  shots: int
  normalization: str
  splits: Mapping[str, str] = _USUAL
  more_metrics: tuple[Callable, ...] = ()


class Answered(NamedTuple):
  """A task with answers in words and a metric of (targets, predictions)."""

  dataset: str
  version: str | None
  prompt: Callable
  shots: int
  metric: Callable
  splits: Mapping[str, str] = _USUAL
  read_answer: Callable[[str], str] = prompts.read_line


def f1_of_yes(targets: list[Option], scores: list[float]) -> dict[str, float]:
  """Returns F1 of the answer "yes", option 1, in percent (MultiRC's F1a)."""
  # F1 is 2 * hits / (chosen "yes" + correct "yes").
  best = [options[0] for options in choices(targets, scores, "sum")]
  hits = sum(o.index == 1 and o.is_correct for o in best)
  chosen = sum(o.index == 1 for o in best)
  right = sum((o.index == 1) == o.is_correct for o in best)
  total = chosen + right
  return {"f1a": 100 * 2 * hits / total if total else 0.0}


def exact(targets: list[list[str]], predictions: list[str]) -> dict[str, float]:
  """Returns the share of predictions equal to the only answer, in percent."""
  return _T5_EXACT([answers[0] for answers in targets], predictions)


_T5_TRIVIA_QA = t5_metric("trivia_qa")
_T5_SQUAD = t5_metric("squad")
_T5_COQA_F1 = t5_metric("coqa_f1")
_T5_EXACT = t5_metric("sequence_accuracy")
_SUPER_GLUE = "1.0.2"
# By task: dataset and version in TFDS, prompt, PaLM's number of exemplars, and
# normalization or metric. PaLM does not say how it compares options. These
# normalizations follow Brown et al. (2.4): by tokens; by the unconditional
# likelihood for ARC, OpenBookQA and RACE; by the sum if all options are the
# same text, or sentences that differ only in a name.
TASKS: dict[str, Scored | Answered] = {
  "trivia_qa": Answered(
    "trivia_qa/unfiltered.nocontext", "1.1.0", prompts.open_question, 1,
    _T5_TRIVIA_QA,
  ),
  "natural_questions": Answered(
    "natural_questions_open", "1.0.0", prompts.open_question, 64, _T5_SQUAD
  ),
  "web_questions": Answered(
    "web_questions", "1.0.0", prompts.open_question, 64, _T5_SQUAD, _TESTED
  ),
  "lambada": Answered(
    "lambada", "1.0.0", prompts.lambada, 8, exact, _TESTED, prompts.read_word
  ),
  "hellaswag": Scored("hellaswag", "1.1.0", prompts.hellaswag, 5, "tokens"),
  "story_cloze": Scored(
    "story_cloze/2016", "1.0.0", prompts.story_cloze, 5, "tokens",
    {"train": "validation", "validation": "test"},
  ),
  "winograd": Scored(
    "wsc273", "1.0.0", prompts.winograd, 5, "sum", {"validation": "test"}
  ),
  "winogrande": Scored(
    "winogrande", "1.2.0", prompts.winogrande, 5, "sum",
    {"train": "train_xl", "validation": "validation"},
  ),
  "drop": Answered(
    "drop", "2.0.0", prompts.drop, 1, _T5_SQUAD,
    {"train": "train", "validation": "dev"},
  ),
  "coqa": Answered("coqa", "1.0.0", prompts.coqa, 5, _T5_COQA_F1, _TESTED),
  "quac": Answered("quac", "1.0.0", quac, 1, _T5_SQUAD),
  "squad_v2": Answered("squad/v2.0", "3.0.0", prompts.squad, 5, _T5_SQUAD),
  "race_middle": Scored(
    "race/middle", "2.0.0", prompts.race, 8, "unconditional", _TESTED
  ),
  "race_high": Scored(
    "race/high", "2.0.0", prompts.race, 5, "unconditional", _TESTED
  ),
  "piqa": Scored("piqa", "1.0.0", prompts.piqa, 5, "tokens"),
  "arc_easy": Scored(
    "ai2_arc/ARC-Easy", "1.0.0", prompts.arc, 5, "unconditional", _TESTED
  ),
  "arc_challenge": Scored(
    "ai2_arc/ARC-Challenge", "1.0.0", prompts.arc, 5, "unconditional", _TESTED
  ),
  "openbookqa": Scored(
    "openbookqa", "0.1.0", prompts.openbookqa, 32, "unconditional", _TESTED
  ),
  "boolq": Scored(
    "super_glue/boolq", _SUPER_GLUE, prompts.boolq, 8, "tokens"
  ),
  "copa": Scored("super_glue/copa", _SUPER_GLUE, prompts.copa, 5, "sum"),
  "rte": Scored("super_glue/rte", _SUPER_GLUE, prompts.rte, 5, "tokens"),
  "wic": Scored("super_glue/wic", _SUPER_GLUE, prompts.wic, 5, "tokens"),
  "multirc": Scored(
    "super_glue/multirc", _SUPER_GLUE, prompts.multirc, 5, "sum",
    more_metrics=(f1_of_yes,),
  ),
  "wsc": Scored("super_glue/wsc.fixed", _SUPER_GLUE, prompts.wsc, 5, "tokens"),
  "record": Scored(
    "super_glue/record", _SUPER_GLUE, prompts.news_cloze, 2, "sum"
  ),
  "cb": Scored("super_glue/cb", _SUPER_GLUE, prompts.cb, 5, "tokens"),
  "anli_r1": Scored("anli/r1", "0.1.0", prompts.anli, 5, "tokens", _TESTED),
  "anli_r2": Scored("anli/r2", "0.1.0", prompts.anli, 5, "tokens", _TESTED),
  "anli_r3": Scored("anli/r3", "0.1.0", prompts.anli, 5, "tokens", _TESTED),
}  # fmt: skip
ENGLISH = tuple(TASKS)
# MMLU is not in TFDS. Its records have the published form: subject, question,
# choices and answer; "train" is its dev set of five questions per subject.
# PaLM's 8 exemplars for GSM8K were written by hand (Wei et al.); here exemplars
# of the same form are drawn from the training set.
TASKS |= {
  "mmlu": Scored("mmlu", None, prompts.mmlu, 5, "sum", _TESTED),
  "gsm8k": Answered(
    "gsm8k", "1.0.0", prompts.gsm8k, 8, exact, _TESTED, prompts.read_number
  ),
}


@gin.configurable
def normalization(**of_tasks: str) -> dict[str, str]:
  """Returns {name of a task: normalization} for the tasks that gin sets."""
  return of_tasks


def _normalization(name: str) -> str:
  return normalization().get(name, TASKS[name].normalization)


def _add(name: str, task: Scored | Answered) -> None:
  source = RecordSource(task.dataset, task.version, task.splits)
  if isinstance(task, Scored):
    add_choices(
      name,
      source,
      task.prompt,
      functools.partial(_normalization, name),
      task.more_metrics,
    )
  else:
    add_questions(
      name, source, task.prompt, [task.metric], task.read_answer, check_t5
    )


for _name, _task in TASKS.items():
  _add(_name, _task)
  few_shot_task(_name, _task.shots)
seqio.MixtureRegistry.add("palm_english", ENGLISH, default_rate=1)
seqio.MixtureRegistry.add(
  "palm_english_few_shot",
  [f"{name}_{TASKS[name].shots}_shot" for name in ENGLISH],
  default_rate=1,
)
