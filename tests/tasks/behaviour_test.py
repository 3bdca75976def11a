# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import functools

import pytest
import seqio

from palm_mtf.tasks import behaviour
from tests.seqio_testing import bind, examples_of, scores_of, text_of

SUITES = {
  "copying": behaviour.copying,
  "counting": behaviour.counting,
  "negation": behaviour.negation,
  "names": behaviour.names,
}


@pytest.fixture(autouse=True)
def settings(no_settings, vocabulary):
  bind(documents__vocabulary__path=vocabulary.path)


# Questions of a suite depend on no setting.
made = functools.cache(examples_of)


def score(name, likelihood) -> dict[str, float]:
  """Returns the metrics of a model with `likelihood(inputs, option)`."""
  name = f"behaviour_{name}"

  def of_example(example):
    return likelihood(*(text_of(example, f) for f in ("inputs", "targets")))

  return scores_of(name, made(name), of_example)


@pytest.mark.parametrize("name", SUITES)
def test_each_question_has_one_right_answer_and_is_asked_once(name):
  questions = list(SUITES[name]())
  assert len(questions) >= 28
  assert len({q.inputs for q in questions}) == len(questions)
  for question in questions:
    assert len(question.correct) == 1
    assert len(set(question.options)) == len(question.options)


def right_count(inputs, option) -> bool:
  words = inputs.removesuffix(",").split()
  last, answer = words[-1].strip(","), option.strip()
  if last.isdigit():
    return int(answer) == int(last) + 1
  numbers = list(behaviour._NUMBERS)
  return numbers.index(answer) == numbers.index(last) + 1


# Each solver finds the answer in another way than the suite made it.
SOLVERS = {
  "copying": lambda inputs, option: option.strip(" .") in inputs,
  "counting": right_count,
  "negation": lambda inputs, option: f"not{option}" not in inputs,
  "names": lambda inputs, option: f" to{option}." in inputs,
}


@pytest.mark.parametrize("name", SUITES)
def test_who_knows_is_right_and_who_knows_only_the_options_guesses(name):
  solved = score(name, SOLVERS[name])
  assert solved["accuracy"] == 100
  assert solved["chance"] == (25 if name in ("copying", "counting") else 50)
  if name != "counting":
    prior = score(name, lambda inputs, option: sum(option.encode()) % 97)
    assert abs(prior["margin"]) < 20


def test_who_prefers_a_name_is_not_invariant_who_prefers_a_role_is():
  by_name = score("names", lambda inputs, option: option < " K")
  by_role = score("names", lambda inputs, option: inputs.startswith(option[1:]))
  assert by_name["invariance"] < 80
  assert by_role["invariance"] == 100
  assert by_role["accuracy"] == 0


def test_assertions_hold_for_text_and_not_for_noise():
  good = "The first thing to do is to read the whole of the page again."
  loop = "go on and " * 20
  results = behaviour.assertions(
    [[]] * 4, [good, loop, "caf\ufffd and so on, it goes", " x "]
  )
  assert results == {"valid_utf8": 75, "long_enough": 75, "not_repetitive": 75}


def test_repetition_is_the_share_of_runs_that_were_there_before():
  assert behaviour.repetition("a b c d a b c d") == pytest.approx(1 / 5)
  assert behaviour.repetition("a b c") == 0


def test_outputs_are_asked_for_and_kept_as_they_are():
  task = seqio.TaskRegistry.get("behaviour_output")
  examples = examples_of("behaviour_output")
  assert all(len(e["inputs"]) for e in examples)
  assert task.postprocess_fn(" as is \n", example=examples[0]) == " as is \n"
