# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The arguments of a command's entry point, and the exit code it leads to."""

import json

import pytest

from tests.cli.conftest import Done

RECIPE = "--gin_file=recipes/quickstart.gin"
DIR = '--gin.MODEL_DIR="x"'
IMPORTED = "palm_mtf.cli.gin_files"


def settings_of(done: Done) -> dict:
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)["settings"]


def test_training_keeps_both_configurations_and_either_gives_the_same(
  palm_mtf, tmp_path
):
  arguments = [RECIPE, DIR, "--gin.NUM_LAYERS=3", "--gin.PROMPTS=['\"\\n']"]
  first = settings_of(palm_mtf("train", *arguments))
  printed = palm_mtf("train", *arguments, "--print_config").stdout
  assert (tmp_path / "x" / "config.gin").read_text() == printed
  kept = {
    name: (tmp_path / "x" / name).read_text()
    for name in ("config.gin", "operative_config.gin")
  }
  for name, text in kept.items():
    (tmp_path / name).write_text(text)
    for command in ("train", "evaluate", "generate"):
      again = settings_of(palm_mtf(command, f"--gin_file={name}"))
      own = {
        "train": set(),
        "evaluate": {"adapter", "golden"},
        "generate": {"adapter", "prompts", "chat", "input_file", "interactive"}
        | {"json_schema", "regex"},
      }
      assert again.keys() - first.keys() == own[command]
      # Training does not set decoding, and only training has replays.
      common = first.keys() - {"decode", "is_replay"}
      assert {x: again[x] for x in common} == {x: first[x] for x in common}


@pytest.mark.parametrize(
  ("flag", "line"),
  [
    (
      "--gin.D_KV=7",
      "D_KV = 7: rotary embedding turns pairs of numbers, so D_KV is even; "
      "use 8. (D_KV is set on the command line)",
    ),
    pytest.param(
      '--gin.MODEL_DIR="x!user"',
      "SEED = 7: the moon is wrong. (SEED is set on the command line)",
      id="found by the entry point",
    ),
  ],
)
def test_a_wrong_value_is_one_line_that_says_where_it_was_set(
  palm_mtf, flag, line
):
  done = palm_mtf("train", RECIPE, DIR, "--gin.SEED=7", flag)
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr == f"palm_mtf: {line}\n"


@pytest.mark.parametrize(
  ("mood", "error"),
  [
    ("crash", "RuntimeError: ours"),
    ("pipe", "BrokenPipeError: a socket, not stdout"),
  ],
)
def test_a_fault_of_ours_has_its_traceback_and_exits_with_one(
  palm_mtf, mood, error
):
  done = palm_mtf("train", RECIPE, f'--gin.MODEL_DIR="x!{mood}"')
  assert done.returncode == 1
  assert done.stderr.startswith("Traceback (most recent call last):\n")
  assert done.stderr.endswith(f"\n{error}\n")


def test_an_interrupt_before_the_run_ends_cleanly(palm_mtf):
  done = palm_mtf("train", RECIPE, '--gin.MODEL_DIR="x!interrupt"')
  assert (done.returncode, done.stderr) == (130, "palm_mtf: interrupted\n")
