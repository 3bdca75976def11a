# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of the categories of a task, such as MMLU's subjects.

A category is what feature `exemplar_group` of its examples says. "accuracy" is
over all examples; "macro_accuracy" the mean over categories, each as much as
the others; "accuracy/law" and "macro_accuracy/law" are those of the categories
that CATEGORY_GROUPS calls "law".
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from palm_mtf.errors import UserError, did_you_mean

Metrics = dict[str, float]


def category_of(example: Mapping[str, Any]) -> str:
  """Returns the category of an example, "" for none."""
  value = example.get("exemplar_group", b"")
  return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""


def check_groups(
  task: str, groups: Mapping[str, Iterable[str]], categories: Iterable[str]
) -> None:
  """Raises UserError if a group has a name that is no category of the task."""
  known = {*categories}
  for group, names in groups.items():
    for name in names:
      if name not in known:
        raise UserError(
          f"CATEGORY_GROUPS: {name!r} in {group!r} is no category of {task}"
          f"{did_you_mean(name, known)}; mend or remove it."
        )


def by_category(
  metrics_of: Callable[[Sequence[int]], Metrics],
  categories: Sequence[str],
  groups: Mapping[str, Iterable[str]],
) -> tuple[Metrics, dict[str, Metrics]]:
  """Returns the averages over categories, and the metrics of each one.

  Args:
    metrics_of: function that returns the metrics of some examples, by number.
    categories: [examples] category of each.
    groups: {group: categories}; those that no example has are left out.
  """
  places: dict[str, list[int]] = {}
  for number, category in enumerate(categories):
    places.setdefault(category, []).append(number)
  if len(places) < 2:
    return {}, {}
  of_each = {name: metrics_of(places[name]) for name in sorted(places)}
  averages = _means(of_each.values(), "")
  for group, names in groups.items():
    inside = [name for name in dict.fromkeys(names) if name in places]
    numbers = sorted(number for name in inside for number in places[name])
    if numbers:
      for name, value in metrics_of(numbers).items():
        averages[f"{name}/{group}"] = value
      averages |= _means([of_each[name] for name in inside], f"/{group}")
  return averages, of_each


def _means(of_each: Iterable[Metrics], end: str) -> Metrics:
  every = list(of_each)
  return {
    f"macro_{name}{end}": float(np.mean([each[name] for each in every]))
    for name in every[0]
    if all(name in each for each in every)
  }
