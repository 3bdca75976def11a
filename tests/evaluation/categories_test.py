# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import pytest

from palm_mtf.errors import UserError
from palm_mtf.evaluation.categories import by_category, check_groups

# Right answers by category: 1 of 4, 1 of 1, 2 of 3.
RIGHT = [1, 0, 0, 0, 1, 1, 1, 0]
CATEGORIES = ["law", "law", "law", "law", "logic", "art", "art", "art"]


def metrics_of(numbers):
  right = [RIGHT[number] for number in numbers]
  return {"accuracy": 100 * sum(right) / len(right)}


def test_averages_are_those_by_hand():
  groups = {"humanities": ["law", "art"], "rest": ["logic", "sport"]}
  averages, of_each = by_category(metrics_of, CATEGORIES, groups)
  assert of_each == {
    "art": {"accuracy": pytest.approx(200 / 3)},
    "law": {"accuracy": 25},
    "logic": {"accuracy": 100},
  }
  assert averages == {
    "macro_accuracy": pytest.approx((200 / 3 + 25 + 100) / 3),
    "accuracy/humanities": pytest.approx(300 / 7),
    "macro_accuracy/humanities": pytest.approx((200 / 3 + 25) / 2),
    "accuracy/rest": 100,
    "macro_accuracy/rest": 100,
  }


# MMLU by group: subjects, questions, accuracy of PaLM 540B and GPT-3 (Touvron
# et al. 2023, Table 9, which also has their averages, 69.3 and 43.9).
MMLU = {
  "humanities": (13, 4705, 77.0, 40.8),
  "STEM": (18, 3018, 55.6, 36.7),
  "social sciences": (12, 3077, 81.0, 50.4),
  "other": (14, 3242, 69.6, 48.8),
}


def test_palm_reports_mmlus_mean_over_subjects_its_authors_over_questions():
  subjects = [x for x, (count, *_) in MMLU.items() for _ in range(count)]

  def of_palm(numbers):
    (group,) = {subjects[number] for number in numbers}
    return {"accuracy": MMLU[group][2]}

  names = [f"{group} {number}" for number, group in enumerate(subjects)]
  averages, _ = by_category(of_palm, names, {})
  assert round(averages["macro_accuracy"], 1) == 69.3
  questions = sum(count for _, count, *_ in MMLU.values())
  of_gpt3 = sum(count * right for _, count, _, right in MMLU.values())
  assert round(of_gpt3 / questions, 1) == 43.9


def test_order_of_the_examples_changes_nothing():
  def reverse(numbers):
    return metrics_of([len(RIGHT) - 1 - number for number in numbers])

  groups = {"humanities": ["art", "law"]}
  assert by_category(reverse, CATEGORIES[::-1], groups) == by_category(
    metrics_of, CATEGORIES, groups
  )


def test_a_task_of_one_category_or_none_has_no_averages_over_them():
  for category in ("", "law"):
    assert by_category(metrics_of, [category] * 8, {}) == ({}, {})


def test_a_group_of_a_category_that_is_none_is_one_line():
  with pytest.raises(UserError) as info:
    check_groups("mmlu", {"humanities": ["law", "artt"]}, CATEGORIES)
  assert str(info.value) == (
    "CATEGORY_GROUPS: 'artt' in 'humanities' is no category of mmlu (did you "
    'mean "art"?); mend or remove it.'
  )
