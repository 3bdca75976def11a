# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0

import pytest

from palm_mtf.config import FewShotConfig, TaskEvalConfig
from palm_mtf.errors import UserError


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"eval_tasks": "mine"}, "EVAL_TASKS = 'mine': give a list of names of"),
    ({"eval_tasks": [""]}, "EVAL_TASKS = ['']: give a list"),
    ({"eval_split": None}, "EVAL_SPLIT = None: give the name of a split"),
    ({"eval_examples": 0}, "EVAL_EXAMPLES = 0: give a whole number"),
    (
      {"answer_patterns": "The answer"},
      "ANSWER_PATTERNS = 'The answer': give texts by task, such as {",
    ),
    (
      {"answer_patterns": {"gsm8k": "The answer is (.*"}},
      "ANSWER_PATTERNS: 'The answer is (.*' of gsm8k: not a regular expression",
    ),
    (
      {"answer_patterns": {"gsm8k": "The (number|answer) is (.*)"}},
      "of gsm8k: has 2 groups; put the answer into one (...), and all else",
    ),
    (
      {"category_groups": {"mmlu": ["law"]}},
      "CATEGORY_GROUPS = {'mmlu': ['law']}: give lists of categories by group",
    ),
    (
      {"category_groups": {"mmlu": {"law": "jurisprudence"}}},
      "give lists of categories by group, and groups by task, such as",
    ),
    (
      {"eval_checkpoints": "newst"},
      "EVAL_CHECKPOINTS = 'newst' (did you mean \"newest\"?)",
    ),
    ({"clean_subset": "yes"}, "CLEAN_SUBSET = 'yes': give True or False."),
    ({"eval_checkpoints": []}, "or a list of steps, such as [1000, 2000]."),
    ({"eval_checkpoints": [True]}, "EVAL_CHECKPOINTS = [True]: give"),
    ({"eval_wait_secs": -1}, "EVAL_WAIT_SECS = -1: give a number"),
    (
      {"task_eval_steps": 5},
      "TASK_EVAL_STEPS = 5: no task is given; name tasks",
    ),
    ({"task_eval_steps": 0, "eval_tasks": ["a"]}, "give a whole number"),
  ],
)
def test_a_wrong_setting_is_one_line(settings, message):
  with pytest.raises(UserError) as info:
    TaskEvalConfig(**settings)
  assert message in str(info.value)
  assert "\n" not in str(info.value)


def test_what_users_write_is_taken():
  config = TaskEvalConfig(
    eval_tasks=["a"], eval_checkpoints=[5, 10], task_eval_steps=5
  )
  assert config.eval_split == "validation"


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"num_shots": -1}, "NUM_SHOTS = -1: give a whole number of at least 0"),
    ({"exemplars": "frist"}, "EXEMPLARS = 'frist' (did you mean \"first\"?)"),
    ({"exemplars": "first"}, 'EXEMPLARS = "first": of how many? Set NUM_SHOTS'),
    ({"exemplar_files": "a.txt"}, "EXEMPLAR_FILES = 'a.txt': give texts by"),
    ({"exemplar_files": {"a": ""}}, "EXEMPLAR_FILES = {'a': ''}: give texts"),
    ({"prompt_headers": {"a": 1}}, "PROMPT_HEADERS = {'a': 1}: give texts by"),
  ],
)
def test_a_wrong_few_shot_setting_is_one_line(settings, message):
  with pytest.raises(UserError) as info:
    FewShotConfig(**settings)
  assert message in str(info.value)
  assert "\n" not in str(info.value)


def test_a_task_keeps_its_form_unless_a_setting_names_it():
  config = FewShotConfig(
    exemplar_files={"a": "a.txt"}, prompt_headers={"b": "B:"}
  )
  assert [config.changes(name) for name in "abc"] == [True, True, False]
  assert FewShotConfig(num_shots=0).changes("c")
