# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures the start of commands: seconds until each has done a first thing.

  python -m tools.bench start --model_dir runs/quickstart
  python -m tools.bench start --model_dir runs/quickstart --only generate --json

  help       palm_mtf --help
  import     TensorFlow, as every command below imports it
  generate   to the first token
  score      of one text
  evaluate   one batch
  train      one step and its checkpoint; vocabulary and tokens exist

--model_dir is a finished run, which is only read.
"""

# XLA_FLAGS=--xla_cpu_max_isa=AVX2 and ONEDNN_MAX_CPU_ISA=AVX2 make a newer CPU
# compute like an older one.

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from palm_mtf.errors import UserError
from tools.bench import pairs
from tools.bench.command import REQUIRED, SEVERAL, Flag

NAMES = ("help", "import", "generate", "score", "evaluate", "train")
_KEPT = ("vocabulary.model", "tokens")  # copied from the run for `train`
_ONE_STEP = ("TRAIN_STEPS=1", "EVAL_BATCHES=1", "PROMPTS=[]")
BOUNDS = pairs.BOUNDS
HEAD = f"{'command':<12}{'processor':>12}{'wall':>12}"
FLAGS = {
  "--model_dir": Flag(None, "a finished run", settings=REQUIRED),
  "--only": Flag(None, "a command; else all", NAMES, SEVERAL),
  "--rounds": Flag(3, "runs of each command"),
}


def commands(model_dir: str, fresh_dir: str) -> dict[str, list[str]]:
  """Returns the arguments for Python, by command name.

  Args:
    model_dir: MODEL_DIR of a finished run.
    fresh_dir: MODEL_DIR for a new run.
  """
  run = ["-m", "palm_mtf"]
  flags = ["--model_dir", model_dir]
  config = f"--gin_file={os.path.join(model_dir, 'config.gin')}"
  one_step = [f"--gin.{x}" for x in (f"MODEL_DIR={fresh_dir!r}", *_ONE_STEP)]
  text = "def main("
  one_token = ["--prompt", text, "--gin.SAMPLE_TOKENS=1"]
  return {
    "help": [*run, "--help"],
    "import": ["-c", "import palm_mtf._tf"],
    "generate": [*run, "generate", *flags, *one_token],
    "score": [*run, "score", *flags, "--text", text],
    "evaluate": [*run, "evaluate", *flags, "--gin.EVAL_BATCHES=1"],
    "train": [*run, "train", config, *one_step],
  }


def run_python(arguments: Sequence[str]) -> tuple[float, float]:
  """Runs Python once; returns CPU seconds of all threads, and wall seconds.

  Raises:
    UserError: if it failed.
  """
  # The kernel sums the CPU time of child processes that have ended.
  before, start = _read_child_seconds(), time.perf_counter()
  done = subprocess.run(
    [sys.executable, *arguments], capture_output=True, check=False, text=True
  )
  wall = time.perf_counter() - start
  if done.returncode:
    said = done.stderr.strip().splitlines() or ["nothing"]
    raise UserError(f"{' '.join(arguments)}: failed and said {said[-1]}")
  return _read_child_seconds() - before, wall


def _read_child_seconds() -> float:
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  return used.ru_utime + used.ru_stime


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields a record with the median seconds of each command."""
  for name in (*_KEPT, "config.gin"):
    if not os.path.exists(os.path.join(chosen.model_dir, name)):
      raise UserError(
        f"--model_dir = {chosen.model_dir!r}: has no {name}; give a run of "
        "palm_mtf train that has finished."
      )
  # Each round runs all commands, so that other load slows all of them alike.
  taken: dict[str, list[tuple[float, float]]] = {}
  for _ in range(chosen.rounds):
    with tempfile.TemporaryDirectory() as folder:
      # A MODEL_DIR without checkpoints, in which `train` starts a new run.
      fresh = Path(folder, "run")
      shutil.copytree(
        chosen.model_dir,
        fresh,
        ignore=lambda at, names: (
          set(names) - {*_KEPT} if at == chosen.model_dir else ()
        ),
      )
      for name, arguments in commands(chosen.model_dir, str(fresh)).items():
        if not chosen.only or name in chosen.only:
          taken.setdefault(name, []).append(run_python(arguments))
  for name, rounds in taken.items():
    cpu, wall = (
      round(statistics.median(secs), 2) for secs in zip(*rounds, strict=True)
    )
    yield {"command": name, "cpu_secs": cpu, "wall_secs": wall}


def row(record: dict) -> str:
  """Returns a line of the table."""
  return (
    f"{record['command']:<12}{record['cpu_secs']:>12}{record['wall_secs']:>12}"
  )
