# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Every question, and reading answers; fewshot_test.py tests all else."""

import pytest

from palm_mtf.tasks import prompts
from tests.tasks.evaluation_records import BLOCK, EXPECTED


def test_a_conversation_holds_the_turns_before_a_question():
  _, second = prompts.coqa(EXPECTED["coqa"][1])
  assert second.inputs == (
    f"{BLOCK}\nQ: What had Ada?\nA: a boat\nQ: Which colour?\nA:"
  )
  assert second.answers == ["red"]


def test_each_question_of_an_article_is_asked():
  _, second = prompts.race(EXPECTED["race_high"][1])
  assert second.inputs == f"{BLOCK}\nQuestion: What was red?\nAnswer:"
  assert (second.options[0], second.correct) == (" boat", [0])


def test_squad_shows_answers_where_there_are_some():
  record = {
    **EXPECTED["squad_v2"][1],
    "answers": {"text": ["Ada", "Ada", "she"], "answer_start": [0, 0, 0]},
  }
  (question,) = prompts.squad(record)
  assert (question.targets, question.answers) == (" Ada", ["Ada", "she"])


def test_a_hidden_label_makes_no_question():
  record = {**EXPECTED["copa"][1], "label": -1}
  assert not list(prompts.copa(record))


def test_a_chain_of_thought_ends_in_its_answer():
  (question,) = prompts.gsm8k(EXPECTED["gsm8k"][1])
  assert question.targets == (
    " She has 1000+2 = 1002 boats. The answer is 1002."
  )


@pytest.mark.parametrize(
  ("output", "number"),
  [
    (" 3 + 4 = 7. The answer is 7.", "7"),
    (" The answer is $1,234.50.", "1234.5"),
    (" The answer is -5 degrees", "-5"),
    (" so 12 and then 30", "30"),
    (" I do not know", ""),
    (" The answer is 20.00. Q: 3", "20"),
  ],
)
def test_the_answer_is_found_in_what_was_thought_aloud(output, number):
  assert prompts.read_number(output) == number


def test_answers_are_a_line_or_a_word():
  assert prompts.read_line(" Jane Austen \nQ: who") == "Jane Austen"
  assert prompts.read_word(" boat, and") == "boat"
  assert prompts.read_word("  ") == ""
