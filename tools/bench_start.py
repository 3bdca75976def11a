# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures the start of commands: seconds until each has done a first thing.

  python tools/bench_start.py --model_dir runs/quickstart
  python tools/bench_start.py --model_dir runs/quickstart --only generate --json

  help       palm_mtf --help
  import     TensorFlow, as every command below imports it
  generate   to the first token
  score      of one text
  evaluate   one batch
  train      one step and its checkpoint, with vocabulary and tokens there

--model_dir is a finished run, which is only read. Results are on stdout.
"""

# XLA_FLAGS=--xla_cpu_max_isa=AVX2 and ONEDNN_MAX_CPU_ISA=AVX2 make a newer CPU
# compute like an older one.

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench_command import one_line_errors

from palm_mtf.errors import UserError, check_count

_RUN = ("-m", "palm_mtf")
_KEPT = ("vocabulary.model", "tokens")  # of the run, copied for `train`
_MAIN = ("-c", "import palm_mtf._tf")
_ONE_STEP = ("TRAIN_STEPS=1", "EVAL_BATCHES=1", "PROMPTS=[]")


def commands(model_dir: str, fresh_dir: str) -> dict[str, list[str]]:
  """Returns the arguments of Python, by the name of a command.

  Args:
    model_dir: MODEL_DIR of a finished run.
    fresh_dir: MODEL_DIR of a run that has not begun.
  """
  given = ["--model_dir", model_dir]
  config = os.path.join(model_dir, "config.gin")
  one_step = [f"--gin.{x}" for x in (f"MODEL_DIR={fresh_dir!r}", *_ONE_STEP)]
  return {
    "help": [*_RUN, "--help"],
    "import": [*_MAIN],
    "generate": [
      *(*_RUN, "generate", *given),
      *("--prompt", "def main(", "--gin.SAMPLE_TOKENS=1"),
    ],
    "score": [*_RUN, "score", *given, "--text", "def main("],
    "evaluate": [*_RUN, "evaluate", *given, "--gin.EVAL_BATCHES=1"],
    "train": [*_RUN, "train", f"--gin_file={config}", *one_step],
  }


def read_arguments() -> argparse.Namespace:
  """Returns the command line's choices."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--model_dir", required=True, help="of a finished run")
  add("--only", action="append", choices=commands("", ""), help="else all")
  add("--rounds", type=int, default=3, help="by default 3")
  add("--json", action="store_true", help="print one object a line")
  chosen = parser.parse_args()
  check_count("--rounds", chosen.rounds)
  for name in (*_KEPT, "config.gin"):
    if not os.path.exists(os.path.join(chosen.model_dir, name)):
      raise UserError(
        f"--model_dir = {chosen.model_dir!r}: has no {name}; give a run of "
        "palm_mtf train that has finished."
      )
  return chosen


def measure(arguments: Sequence[str]) -> tuple[float, float]:
  """Runs Python once; returns CPU seconds of all threads, and wall seconds.

  Raises:
    UserError: it failed.
  """
  # The kernel adds up the CPU time of children that have ended.
  before, start = _child_seconds(), time.perf_counter()
  done = subprocess.run(
    [sys.executable, *arguments], capture_output=True, check=False, text=True
  )
  wall = time.perf_counter() - start
  if done.returncode:
    said = done.stderr.strip().splitlines() or ["nothing"]
    raise UserError(f"{' '.join(arguments)}: failed and said {said[-1]}")
  return _child_seconds() - before, wall


def _child_seconds() -> float:
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  return used.ru_utime + used.ru_stime


def measure_all(chosen: argparse.Namespace) -> dict[str, dict[str, float]]:
  """Returns "cpu_secs" and "wall_secs", the medians, of each command."""
  # All commands once a round: what else the machine does falls on all alike.
  taken: dict[str, list[tuple[float, float]]] = {}
  for _ in range(chosen.rounds):
    with tempfile.TemporaryDirectory() as folder:
      # A MODEL_DIR without checkpoints, in which `train` begins each round.
      fresh = Path(folder, "run")
      shutil.copytree(
        chosen.model_dir,
        fresh,
        ignore=lambda at, names: (
          set(names) - {*_KEPT} if at == chosen.model_dir else ()
        ),
      )
      for name, each in commands(chosen.model_dir, str(fresh)).items():
        if not chosen.only or name in chosen.only:
          taken.setdefault(name, []).append(measure(each))
  return {
    name: {
      key: round(statistics.median(secs), 2)
      for key, secs in zip(
        ("cpu_secs", "wall_secs"), zip(*rounds, strict=True), strict=True
      )
    }
    for name, rounds in taken.items()
  }


@one_line_errors
def main() -> None:
  """Measures, and prints the medians of each command."""
  chosen = read_arguments()
  found = measure_all(chosen)
  if not chosen.json:
    print(f"{'command':<12}{'processor':>12}{'wall':>12}")
  for name, record in found.items():
    if chosen.json:
      print(json.dumps({"command": name, **record}))
    else:
      print(f"{name:<12}{record['cpu_secs']:>12}{record['wall_secs']:>12}")


if __name__ == "__main__":
  sys.exit(main())
