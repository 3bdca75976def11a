# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import pytest

from palm_mtf.errors import UserError
from palm_mtf.tasks import fewshot
from palm_mtf.tasks.averages import NLG, NLU, palm_averages

# PaLM 540B, 1-shot (Chowdhery et al. 2022, Table 4).
PUBLISHED = {
  "trivia_qa": {"em": 81.4},
  "natural_questions": {"em": 29.3},
  "web_questions": {"em": 22.6},
  "lambada": {"sequence_accuracy": 81.8},
  "hellaswag": {"accuracy": 83.6},
  "story_cloze": {"accuracy": 86.1},
  "winograd": {"accuracy": 87.5},
  "winogrande": {"accuracy": 83.7},
  "drop": {"f1": 70.8},
  "coqa": {"f1": 79.9},
  "quac": {"f1": 47.7},
  "squad_v2": {"f1": 82.9, "em": 78.7},
  "race_middle": {"accuracy": 69.3},
  "race_high": {"accuracy": 52.1},
  "piqa": {"accuracy": 83.9},
  "arc_easy": {"accuracy": 85.0},
  "arc_challenge": {"accuracy": 60.1},
  "openbookqa": {"accuracy": 53.6},
  "boolq": {"accuracy": 88.7},
  "copa": {"accuracy": 91.0},
  "rte": {"accuracy": 78.7},
  "wic": {"accuracy": 63.2},
  "multirc": {"f1a": 84.9},
  "wsc": {"accuracy": 86.3},
  "record": {"accuracy": 92.8},
  "cb": {"accuracy": 83.9},
  "anli_r1": {"accuracy": 52.6},
  "anli_r2": {"accuracy": 48.7},
  "anli_r3": {"accuracy": 52.3},
}
PUBLISHED_AVERAGES = {"Avg NLG": 63.9, "Avg NLU": 74.7}


def test_the_papers_averages_come_of_the_papers_numbers():
  averages = palm_averages(PUBLISHED)
  assert {k: round(v, 1) for k, v in averages.items()} == PUBLISHED_AVERAGES
  assert averages["Avg NLU"] == pytest.approx(1568.0 / 21)


def test_names_of_few_shot_forms_count_as_the_task():
  for form in ("1_shot", "1_shot_seed_3", "1_shot_custom", "custom"):
    named = {f"{name}_{form}": each for name, each in PUBLISHED.items()}
    assert palm_averages(named) == palm_averages(PUBLISHED)


def test_they_are_of_the_29_tasks_that_are_registered():
  assert {task for task, _ in NLG + NLU} == set(fewshot.ENGLISH)
  assert (len(NLG), len(NLU)) == (9, 21)


def test_what_is_missing_or_twice_there_is_named():
  few = {name: each for name, each in PUBLISHED.items() if name != "piqa"}
  with pytest.raises(UserError, match="all 29 tasks: piqa accuracy missing"):
    palm_averages(few)
  with pytest.raises(UserError, match="two forms of piqa"):
    palm_averages({**PUBLISHED, "piqa_5_shot": {"accuracy": 1.0}})
