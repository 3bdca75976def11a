# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import pytest

from palm_mtf.evaluation.outputs import answer_finder, changed_outputs

ANSWER = r"[Tt]he answer is (.*?)\."


@pytest.mark.parametrize(
  ("pattern", "output", "answer"),
  [
    (ANSWER, " 5 + 6 = 11. The answer is 11.", "11"),
    (ANSWER, " So the answer is (b). The answer is (c).", "(b)"),
    (ANSWER, " 11", ""),
    (ANSWER, " The answer is \n11.", ""),
    (f"(?s){ANSWER}", " The answer is \n11.", "\n11"),
    (r"####\s*(-?\d+)|no number", " no number", ""),
    (r"####\s*(-?\d+)|no number", " 3 + 4\n#### 7", "7"),
  ],
)
def test_the_answer_is_the_group_of_the_first_match_or_nothing(
  pattern, output, answer
):
  assert answer_finder(pattern)(output) == answer


def test_outputs_are_changed_in_turn_and_before_the_postprocessor():
  def postprocess(output, example=None, is_target=False):
    return f"<{output}>"

  once = changed_outputs(postprocess, lambda text: text.partition("|")[0])
  twice = changed_outputs(once, lambda text: text + "!")
  assert once("a|b", example={}, is_target=False) == "<a>"
  assert twice("a|b", example={}, is_target=False) == "<a!>"
  assert twice("a|b", example={}, is_target=True) == "<a|b>"


def test_each_of_several_samples_is_changed():
  upper = changed_outputs(None, str.upper)
  assert upper(["a", "b"], example={}) == ["A", "B"]
  assert upper("a", is_target=True) == "a"
