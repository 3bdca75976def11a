# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of one word and of two, and the groups that two words make."""

import json

import pytest

from palm_mtf.cli.command_table import (
  COMMANDS,
  Command,
  commands_in,
  split_name,
)
from palm_mtf.errors import UserError

RECIPE = "--gin_file=recipes/quickstart.gin"
DIR = '--gin.MODEL_DIR="x"'
HEAVY = {"tensorflow", "mesh_tensorflow", "numpy", "sentencepiece", "jax"}


@pytest.fixture
def pairs(monkeypatch):
  """Adds a group, and a command that is a group too."""
  for name in ("trial once", "trial twice", "train again"):
    monkeypatch.setitem(COMMANDS, name, Command("try", entry_point=""))


@pytest.mark.parametrize(
  ("arguments", "name", "rest"),
  [
    (["train", "--x"], "train", ["--x"]),
    (["train", "a.gin", "--x"], "evaluate", ["a.gin", "--x"]),
    (["train", "again", "x"], "train again", ["x"]),
    (["trial", "once", "--x"], "trial once", ["--x"]),
    (["trial"], "trial", []),
    (["trial", "--help"], "trial", ["--help"]),
    (["--help", "train"], "", ["--help", "train"]),
  ],
)
def test_a_name_has_one_word_or_two(pairs, arguments, name, rest):
  if name == "evaluate":  # that is no group: a wrong argument, not a name
    arguments = ["evaluate", *arguments[1:]]
  assert split_name(arguments) == (name, rest)


@pytest.mark.parametrize(
  ("arguments", "what"),
  [
    (["trial", "onse"], '"trial onse" (did you mean "trial once"?)'),
    (["trial", "xyz"], '"trial xyz"'),
    (["train", "agan"], '"train agan" (did you mean "train again"?)'),
    (["tral", "once"], '"tral once" (did you mean "trial once"?)'),
    (["trila"], '"trila" (did you mean "trial"?)'),
    (["evalute", "a.gin"], '"evalute" (did you mean "evaluate"?)'),
  ],
)
def test_an_unknown_name_is_answered_with_the_nearest(pairs, arguments, what):
  with pytest.raises(UserError) as info:
    split_name(arguments)
  known = ", ".join(commands_in(arguments[0]) or COMMANDS)
  assert str(info.value).startswith(f"unknown command {what}")
  assert str(info.value).endswith(f". Commands: {known}.")


def imported(done) -> set[str]:
  lines = [x for x in done.stderr.splitlines() if x.startswith("import time:")]
  return {line.rpartition("|")[2].strip() for line in lines}


@pytest.mark.parametrize(
  ("arguments", "usage"),
  [
    (["trial", "--help"], "palm_mtf trial COMMAND [flags]"),
    (["trial", "once", "-h"], "palm_mtf trial once [--gin_file=FILE ...] "),
    (["trial", "twice", "--help"], "palm_mtf trial twice [-h] --times TIMES"),
  ],
)
def test_help_of_two_words_imports_nothing_heavy(
  grouped_palm_mtf, arguments, usage
):
  done = grouped_palm_mtf(*arguments)
  assert done.returncode == 0
  assert done.stdout.startswith(f"usage: {usage}")
  done = grouped_palm_mtf(*arguments, python=("-X", "importtime"))
  assert not imported(done) & (HEAVY | {"gin", "palm_mtf.config.run"})


def test_help_of_a_group_lists_its_commands_and_no_others(grouped_palm_mtf):
  lines = grouped_palm_mtf("trial", "--help").stdout.splitlines()
  listed = [line.split("  ")[1] for line in lines if line.startswith("  trial")]
  assert listed == ["trial once", "trial twice"]
  assert not any(line.startswith("  train") for line in lines)


@pytest.mark.parametrize(
  ("arguments", "line"),
  [
    (
      ["trial"],
      "trial is not a command by itself: give one of trial once, trial twice; "
      "see palm_mtf trial --help",
    ),
    (["trial", "--foo"], "unknown flag --foo; see palm_mtf trial --help"),
    (
      ["trial", "onse"],
      'unknown command "trial onse" (did you mean "trial once"?). Commands: '
      "trial once, trial twice.",
    ),
    (
      ["trial", "twice"],
      "the following arguments are required: --times; see palm_mtf trial twice "
      "--help",
    ),
    (
      ["trial", "twice", "--time=3"],
      'unknown flag --time (did you mean "--times"?); see palm_mtf trial twice '
      "--help",
    ),
    (
      ["trial", "twice", "--times=3", "4"],
      'unknown argument "4"; see palm_mtf trial twice --help',
    ),
    (
      ["trial", "once", RECIPE],
      "MODEL_DIR is not set; pass --gin.MODEL_DIR='\"...\"'",
    ),
  ],
)
def test_a_mistake_with_two_words_is_one_line(
  grouped_palm_mtf, arguments, line
):
  done = grouped_palm_mtf(*arguments)
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr == f"palm_mtf: {line}\n"


def test_gin_configures_a_command_of_two_words(grouped_palm_mtf):
  done = grouped_palm_mtf("trial", "once", RECIPE, DIR, "--json")
  got = json.loads(done.stdout)
  assert got["kinds"]["data"] == "DataConfig"
  assert got["as_json"] is True
  printed = grouped_palm_mtf("trial", "once", RECIPE, DIR, "--print_config")
  assert printed.stdout.startswith(f"# palm_mtf trial once {RECIPE} '{DIR}'\n")


def test_a_command_without_gin_gets_its_flags(grouped_palm_mtf):
  done = grouped_palm_mtf("trial", "twice", "--times", "3")
  assert (done.returncode, done.stdout, done.stderr) == (0, "twice 3\n", "")
