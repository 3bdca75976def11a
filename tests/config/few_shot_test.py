# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import pytest

from palm_mtf.config.few_shot import FewShotConfig
from palm_mtf.errors import UserError


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
def test_a_wrong_setting_is_one_line(settings, message):
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
