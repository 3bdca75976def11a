# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The command in a process: help, mistakes, exit codes and imports."""

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


COMMANDS = (
  "train, plan, sweep, evaluate, generate, score, index build, index chunks, "
  "index tune, serve, export, import, data cache, data inspect, data report, "
  "checkpoints list, checkpoints verify, checkpoints compare, "
  "checkpoints prune, lineage, vocab, vocab inspect, pods serve, "
  "pods manage, pods join, pods token, pods list, pods drain, pods release, "
  "report, doctor"
)


@pytest.mark.parametrize("name", ["", "data", *COMMANDS.split(", ")])
def test_help_answers_at_once_because_it_imports_nothing_heavy(palm_mtf, name):
  done = palm_mtf(*name.split(), "-h" if name == "evaluate" else "--help")
  assert (done.returncode, done.stderr) == (0, "")
  assert done.stdout.startswith(f"usage: palm_mtf {name}".rstrip() + " ")
  assert not done.modules & (HEAVY | {"gin", "palm_mtf.config.run"})


@pytest.mark.parametrize("group", ["", "data", "vocab", "checkpoints"])
def test_help_lists_the_commands_of_a_group_and_no_others(palm_mtf, group):
  lines = palm_mtf(*group.split(), "--help").stdout.splitlines()
  listed = [line.strip().split("  ")[0] for line in lines]
  assert [name for name in listed if name in COMMANDS.split(", ")] == [
    name
    for name in COMMANDS.split(", ")
    if name.startswith(group) and name != group
  ]


@pytest.mark.parametrize("name", ["train", "score"])
def test_help_says_what_is_required_with_an_example(palm_mtf, name):
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
    (
      ["dta", "cache"],
      'unknown command "dta cache" (did you mean "data cache"?). Commands: '
      f"{COMMANDS}.",
    ),
    (["--foo"], "unknown flag --foo; see palm_mtf --help"),
    (
      ["train", "--gin_fil=x"],
      'unknown flag --gin_fil (did you mean "--gin_file"?); see palm_mtf train '
      "--help",
    ),
    (
      ["data"],
      "data is not a command by itself: give one of data cache, data inspect, "
      "data report; see palm_mtf data --help",
    ),
    (
      ["vocab", "inspect", "--vocabulary=v", "--input=a", "4"],
      'unknown argument "4"; see palm_mtf vocab inspect --help',
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
      ["train", RECIPE, "--gin.SEED=1\nX=2"],
      "--gin.SEED=1\\nX=2: give one value.",
    ),
    (["train", RECIPE], "MODEL_DIR is not set; pass --gin.MODEL_DIR='\"...\"'"),
  ],
)
def test_a_users_mistake_is_one_line_and_two_before_anything_is_imported(
  palm_mtf, arguments, line
):
  done = palm_mtf(*arguments)
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr == f"palm_mtf: {line}\n"
  assert not done.modules & (
    HEAVY | {"palm_mtf.commands.train", "palm_mtf.commands.evaluate"}
  )


@pytest.mark.parametrize(
  "name", ["train", "evaluate", "generate", "score", "data inspect"]
)
def test_print_config_prints_and_imports_no_entry_point(palm_mtf, name):
  done = palm_mtf(*name.split(), RECIPE, DIR, "--print_config")
  assert (done.returncode, done.stderr) == (0, "")
  assert done.stdout.startswith(
    f"# palm_mtf {name} {RECIPE} '{DIR}'\n"
    "from __gin__ import dynamic_registration\n"
  )
  assert 'MODEL_DIR = "x"  # command line\n' in done.stdout
  assert "gin" in done.modules
  entry_point = f"palm_mtf.commands.{name.split()[0]}"
  assert not done.modules & (HEAVY | {entry_point})


def test_a_checkout_prints_the_same_and_a_process_of_its_own_imports_no_more(
  palm_mtf, tmp_path
):
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
  lines = done.stderr.splitlines()
  assert not {line.rpartition("|")[2].strip() for line in lines} & HEAVY


def test_doctor_gets_its_flags_and_gives_its_code(palm_mtf):
  flags = {"as_json": False, "measure": False}
  assert palm_mtf("doctor").stdout == f"doctor {flags}\n"
  flags = {"as_json": True, "measure": True}
  given = ["--json", "--measure"]
  assert palm_mtf("doctor", *given).stdout == f"doctor {flags}\n"


@pytest.mark.parametrize(
  ("arguments", "unbuffered"),
  [
    (("train", "--help"), ""),
    (("train", "--help"), "1"),
    (("train", RECIPE, DIR, "--print_config"), "1"),
    (("evaluate", RECIPE, DIR), ""),
  ],
)
def test_only_a_full_disk_is_an_error_and_not_a_reader_that_has_read_enough(
  palm_mtf_process, monkeypatch, unbuffered, arguments
):
  monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
  reading, writing = os.pipe()
  os.close(reading)
  done = palm_mtf_process(*arguments, stdout=writing)
  os.close(writing)
  assert (done.returncode, done.stderr) == (0, "")
  with open("/dev/full", "w") as full:
    done = palm_mtf_process(*arguments, stdout=full)
  assert (done.returncode, done.stderr) == (
    2,
    "palm_mtf: stdout cannot be written: No space left on device; send the "
    "results to a disk with free space.\n",
  )
