# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The command from outside: help, mistakes, exit codes and what it imports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from palm_mtf import __version__

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPE = "--gin_file=recipes/quickstart.gin"
DIR = '--gin.MODEL_DIR="x"'
HEAVY = {
  "jax",
  "matplotlib",
  "mesh_tensorflow",
  "numpy",
  "rich",
  "sentencepiece",
  "tensorflow",
}


def imported(done: subprocess.CompletedProcess) -> set[str]:
  """All modules that a run with `-X importtime` imported."""
  lines = done.stderr.splitlines()
  return {
    line.rpartition("|")[2].strip()
    for line in lines
    if line.startswith("import time:")
  }


COMMANDS = (
  "train, evaluate, generate, score, data cache, data inspect, "
  "data statistics, "
  "checkpoints list, checkpoints verify, checkpoints compare, "
  "checkpoints prune, vocab, vocab inspect, pods serve, report, doctor"
)

HELPS = [
  ("--help",),
  ("train", "--help"),
  ("evaluate", "-h"),
  ("generate", "--help"),
  ("score", "--help"),
  ("vocab", "--help"),
  ("vocab", "inspect", "-h"),
  ("report", "--help"),
  ("doctor", "--help"),
]


@pytest.mark.parametrize("arguments", HELPS, ids=" ".join)
def test_help_answers_at_once_because_it_imports_nothing_heavy(
  palm_mtf, arguments
):
  done = palm_mtf(*arguments, python=("-X", "importtime"))
  assert done.returncode == 0
  assert not imported(done) & (HEAVY | {"gin", "palm_mtf.config.run"})


def test_help_lists_the_commands(palm_mtf):
  done = palm_mtf("--help")
  for name in COMMANDS.split(", "):
    assert f"\n  {name} " in done.stdout
  assert done.stderr == ""


@pytest.mark.parametrize("name", ["train", "evaluate", "generate", "score"])
def test_help_of_a_command_says_what_it_requires_with_an_example(
  palm_mtf, name
):
  text = palm_mtf(name, "--help").stdout
  assert "Required: MODEL_DIR" in text
  assert f"Example:\n  palm_mtf {name} --gin_file=" in text
  assert ("--json" in text) == (name != "train")


def test_version(palm_mtf):
  assert palm_mtf("--version").stdout == f"palm_mtf {__version__}\n"


@pytest.mark.parametrize(
  ("arguments", "line"),
  [
    ([], f"no command: give one of {COMMANDS}; see palm_mtf --help"),
    (
      ["trian"],
      f'unknown command "trian" (did you mean "train"?). Commands: {COMMANDS}.',
    ),
    (["xyz"], f'unknown command "xyz". Commands: {COMMANDS}.'),
    (["--foo"], "unknown flag --foo; see palm_mtf --help"),
    (
      ["train", "--gin_fil=x"],
      'unknown flag --gin_fil (did you mean "--gin_file"?); see palm_mtf train '
      "--help",
    ),
    (
      ["train", "--print-config"],
      'unknown flag --print-config (did you mean "--print_config"?); see '
      "palm_mtf train --help",
    ),
    (
      ["vocab", "inspekt"],
      'unknown command "vocab inspekt" (did you mean "vocab inspect"?). '
      "Commands: vocab inspect.",
    ),
    (
      ["vocab", "--input", "x", "--size", "many", "--output", "y"],
      "argument --size: invalid int value: 'many'; see palm_mtf vocab --help",
    ),
    (
      ["vocab", RECIPE],
      "unknown flag --gin_file; see palm_mtf vocab --help",
    ),
    (
      ["vocab", "inspect", "--input", "x"],
      "the following arguments are required: --vocabulary; see palm_mtf vocab "
      "inspect --help",
    ),
    (["train", "--json"], "unknown flag --json; see palm_mtf train --help"),
    (
      ["train", "recipes/quickstart.gin"],
      'unknown argument "recipes/quickstart.gin"; for a gin file, write '
      "--gin_file=recipes/quickstart.gin",
    ),
    (
      ["train", "--gin_file"],
      "argument --gin_file: expected one argument; see palm_mtf train --help",
    ),
    (
      ["train", RECIPE, "--gin.SEED=1\nX=2"],
      "--gin.SEED=1\\nX=2: give one value.",
    ),
    (
      ["train", RECIPE, "--gin.MODEL_DIR=x"],
      "--gin.MODEL_DIR=x: x is not a Python value; write "
      "--gin.MODEL_DIR='\"x\"'",
    ),
    (
      ["train", RECIPE],
      "MODEL_DIR is not set; pass --gin.MODEL_DIR='\"...\"'",
    ),
    (
      ["evaluate", RECIPE, DIR, "--gin.NUM_LAYER=3"],
      'unknown macro NUM_LAYER (did you mean "NUM_LAYERS"?) on the command '
      "line; --print_config lists all of them",
    ),
  ],
)
def test_a_users_mistake_is_one_line_and_two_before_anything_is_imported(
  palm_mtf, arguments, line
):
  done = palm_mtf(*arguments)
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr == f"palm_mtf: {line}\n"
  modules = imported(palm_mtf(*arguments, python=("-X", "importtime")))
  assert not modules & (
    HEAVY | {"palm_mtf.commands.train", "palm_mtf.commands.evaluate"}
  )


@pytest.mark.parametrize("name", ["train", "evaluate", "generate", "score"])
def test_print_config_prints_and_imports_no_entry_point(palm_mtf, name):
  done = palm_mtf(name, RECIPE, DIR, "--print_config")
  assert (done.returncode, done.stderr) == (0, "")
  assert done.stdout.startswith(
    f"# palm_mtf {name} {RECIPE} '{DIR}'\n"
    "from __gin__ import dynamic_registration\n"
  )
  assert 'MODEL_DIR = "x"  # command line\n' in done.stdout
  modules = imported(
    palm_mtf(name, RECIPE, DIR, "--print_config", python=("-X", "importtime"))
  )
  module = {"generate": "infer"}.get(name, name)
  assert "gin" in modules
  assert not modules & (HEAVY | {f"palm_mtf.{module}"})


def test_a_checkout_prints_the_same_configuration(palm_mtf, tmp_path):
  arguments = ["train", RECIPE, DIR, "--print_config"]
  done = subprocess.run(
    [sys.executable, "-X", "importtime", "-m", "palm_mtf", *arguments],
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    cwd=tmp_path,
    capture_output=True,
    text=True,
    check=True,
  )
  assert done.stdout == palm_mtf(*arguments).stdout
  assert not imported(done) & HEAVY


def test_vocab_gets_its_flags(palm_mtf):
  flags = ["--size=300", "--output", "y", "--input", "a", "b", "--input=c"]
  assert (
    palm_mtf("vocab", *flags).stdout
    == "vocab "
    + repr(
      {
        "as_json": False,
        "globs": ["a", "b", "c"],
        "size": 300,
        "prefix": "y",
        "text_field": "text",
      }
    )
    + "\n"
  )
  flags = ["--vocabulary=x", "--json", "--input=a", "--text_field=body"]
  assert (
    palm_mtf("vocab", "inspect", *flags).stdout
    == "inspect "
    + repr(
      {
        "as_json": True,
        "vocabulary": "x",
        "globs": ["a"],
        "text_field": "body",
      }
    )
    + "\n"
  )


def test_doctor_gets_its_flags_and_gives_its_code(palm_mtf):
  flags = {"as_json": False, "gin_file": [], "measure": False}
  assert palm_mtf("doctor").stdout == f"doctor {flags}\n"
  flags = {"as_json": True, "gin_file": ["a", "b"], "measure": True}
  given = ["--json", "--gin_file=a", "--gin_file=b", "--measure"]
  assert palm_mtf("doctor", *given).stdout == f"doctor {flags}\n"


@pytest.mark.parametrize(
  "arguments",
  [
    ("--help",),
    ("train", RECIPE, DIR, "--print_config"),
    ("evaluate", RECIPE, DIR),
  ],
  ids=" ".join,
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_read_enough_is_no_error(
  palm_mtf, monkeypatch, unbuffered, arguments
):
  monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
  reading, writing = os.pipe()
  os.close(reading)
  done = palm_mtf(*arguments, stdout=writing)
  os.close(writing)
  assert (done.returncode, done.stderr) == (0, "")
