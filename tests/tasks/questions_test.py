# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest

from palm_mtf.tasks.questions import Option, option_accuracy

# Log-likelihoods of two options: the second is longer and a little less likely
# in total; the first is likely after any text.
SCORES = [-2.0, -2.6]
ALONE = [-1.0, -9.0]
TOKENS, CHARACTERS = (1, 2), (4, 5)


def options(correct: int) -> list[Option]:
  return [
    Option(7, i, i == correct, unconditional, TOKENS[i], CHARACTERS[i])
    for i in range(2)
    for unconditional in (False, True)
  ]


@pytest.mark.parametrize(
  ("normalization", "best"),
  [("sum", 0), ("tokens", 1), ("characters", 0), ("unconditional", 1)],
)
def test_options_are_compared_as_the_normalization_says(normalization, best):
  scores = [SCORES[0], ALONE[0], SCORES[1], ALONE[1]]
  # By hand: -2 > -2.6; -2 < -1.3; -0.5 > -0.52; -1 < 6.4.
  for correct in range(2):
    result = option_accuracy(options(correct), scores, normalization)
    assert result["accuracy"] == (100 if correct == best else 0)
    assert result["chance"] == 50
    assert result["margin"] == result["accuracy"] - 50


def random_questions(num_questions, num_options):
  random = np.random.default_rng(0)
  targets, scores = [], []
  for question in range(num_questions):
    correct = random.integers(num_options)
    for i in range(num_options):
      length = int(random.integers(1, 9))
      targets.append(
        Option(question, i, i == correct, False, length, 3 * length)
      )
      scores.append(float(random.normal() * length))
  return targets, scores


@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize("num_options", [2, 4])
def test_accuracy_is_that_of_t5s_rank_classification(by_tokens, num_options):
  pytest.importorskip("t5", reason="t5 is not installed")
  from t5.evaluation.metrics import rank_classification

  targets, scores = random_questions(50, num_options)
  of_t5 = rank_classification(
    [((t.question, t.index), t.is_correct, 1.0, t.num_tokens) for t in targets],
    scores,
    num_classes=num_options,
    normalize_by_target_length=by_tokens,
  )
  ours = option_accuracy(targets, scores, "tokens" if by_tokens else "sum")
  assert ours["accuracy"] == pytest.approx(of_t5["accuracy"])


def test_random_scores_are_right_as_often_as_chance():
  targets, scores = random_questions(2000, 4)
  result = option_accuracy(targets, scores, "tokens")
  error = 100 * math.sqrt(0.25 * 0.75 / 2000)
  assert result["chance"] == 25
  assert abs(result["margin"]) < 4 * error


def test_several_right_options_raise_the_chance():
  targets = [Option(0, i, i < 2, False, 1, 1) for i in range(4)]
  result = option_accuracy(targets, [-4.0, -1.0, -2.0, -3.0], "sum")
  assert result == {"accuracy": 100, "chance": 50, "margin": 50}
