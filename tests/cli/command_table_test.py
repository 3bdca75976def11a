# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of commands have one or two words; the first of two is a group."""

import pytest

from palm_mtf.cli.command_table import COMMANDS, commands_in, split_name
from palm_mtf.errors import UserError


@pytest.mark.parametrize(
  ("arguments", "name", "rest"),
  [
    (["train", "--x"], "train", ["--x"]),
    (["evaluate", "a.gin", "--x"], "evaluate", ["a.gin", "--x"]),
    (["vocab", "inspect", "x"], "vocab inspect", ["x"]),
    (["data", "cache", "--x"], "data cache", ["--x"]),
    (["data"], "data", []),
    (["data", "--help"], "data", ["--help"]),
    (["--help", "train"], "", ["--help", "train"]),
  ],
)
def test_a_name_has_one_word_or_two(arguments, name, rest):
  assert split_name(arguments) == (name, rest)


@pytest.mark.parametrize(
  ("arguments", "what"),
  [
    (["data", "cahce"], '"data cahce" (did you mean "data cache"?)'),
    (["data", "xyz"], '"data xyz"'),
    (["vocab", "inspct"], '"vocab inspct" (did you mean "vocab inspect"?)'),
    (["dta", "cache"], '"dta cache" (did you mean "data cache"?)'),
    (["chekpoints"], '"chekpoints" (did you mean "checkpoints"?)'),
    (["evalute", "a.gin"], '"evalute" (did you mean "evaluate"?)'),
  ],
)
def test_an_unknown_name_is_answered_with_the_nearest(arguments, what):
  with pytest.raises(UserError) as info:
    split_name(arguments)
  known = ", ".join(commands_in(arguments[0]) or COMMANDS)
  assert str(info.value).startswith(f"unknown command {what}")
  assert str(info.value).endswith(f". Commands: {known}.")
