# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures how the memory of a process grows with what it repeats.

  python -m tools.bench_memory
  python -m tools.bench_memory --only rewinds --times 40 --json

  samples           of SAMPLE_STEPS: a decoder each
  batch sizes       changes of GLOBAL_BATCH_SIZE: a training program each
  rewinds           after loss spikes: a training program each
  rewinds of pods   the same with two pods: the largest of their servers
  task evaluations  of TASK_EVAL_STEPS: predictions and scores
  prompts           of one `palm_mtf generate --interactive`

Resident bytes are those of metrics.jsonl, which ps(1) calls RSS. Every kind is
measured in a new process, on a model of one layer. Results are on stdout.
"""

import argparse
import concurrent.futures
import contextlib
import io
import json
import multiprocessing
import os
import sys
import tempfile
import unittest.mock
from collections.abc import Mapping, Sequence
from pathlib import Path

from palm_mtf.errors import UserError, check_choice, check_count
from palm_mtf.machine.host_memory import resident_bytes
from tools.bench_command import one_line_errors

TIMES = {
  "samples": 1000,
  "batch sizes": 50,
  "rewinds": 20,
  "rewinds of pods": 20,
  "task evaluations": 200,
  "prompts": 1000,
}
# Repetitions after which the table has a column; growth is after the tenth.
_COLUMNS = (1, 10, 20, 50, 200)
_TENTH = 10
_NEVER = 10**6
# A step repeats the kind once, and has a line in metrics.jsonl.
_QUIET = {
  "LOG_STEPS": 1,
  "EVAL_STEPS": _NEVER,
  "EVAL_BATCHES": 1,
  "CHECKPOINT_STEPS": _NEVER,
  "KEEP_CHECKPOINTS": 1,
  "PROMPTS": [],
}
_REWINDS = {
  "SPIKE_POLICY": "rewind",
  "SPIKE_SKIP_STEPS": 1,
  "SPIKE_REWINDS": _NEVER,
  "CHECKPOINT_STEPS": 1,
}


def macros_of(kind: str, times: int) -> dict[str, object]:
  """Returns the macros of a run that repeats a kind so many times."""
  sizes = [[step, 4 + 4 * (step % 2)] for step in range(times)]
  own = {
    "samples": {"SAMPLE_STEPS": 1, "PROMPTS": ["one two"]},
    "batch sizes": {"GLOBAL_BATCH_SIZE": sizes},
    "rewinds": _REWINDS,
    "rewinds of pods": {**_REWINDS, "NUM_PODS": 2, "PODS": "local_servers"},
    "task evaluations": {"EVAL_TASKS": ["counting"], "TASK_EVAL_STEPS": 1},
    "prompts": {},
  }
  # A change of the batch size stands between two steps.
  steps = {"batch sizes": times + 1, "prompts": 1}.get(kind, times)
  return {"TRAIN_STEPS": steps, **_QUIET, **own[kind]}


@contextlib.contextmanager
def spikes_in_every_second_step():
  """Lets each training loop see a loss spike in its second step."""
  from palm_mtf.training.loss_spikes import SpikePolicy

  real = SpikePolicy.sees_spike

  def sees_spike(self: SpikePolicy, metrics: Mapping[str, float]) -> bool:
    real(self, metrics)
    self.num_seen = getattr(self, "num_seen", 0) + 1
    return self.num_seen == 2

  with unittest.mock.patch.object(SpikePolicy, "sees_spike", sees_spike):
    yield


def add_task() -> None:
  """Registers the task "counting", whose metrics take every kind of answer."""
  import seqio

  from tests.seqio_testing import add_examples

  texts = {"inputs": ["one two", "seven"], "targets": [" three", " eight"]}
  add_examples(
    "counting",
    {"validation": texts},
    [seqio.preprocessors.tokenize],
    features=tuple(texts),
    metric_fns=[
      lambda targets, scores: {"score": sum(scores)},
      lambda targets, predictions: {"right": float(targets == predictions)},
    ],
  )


class Prompts(io.StringIO):
  """Lines for --interactive; notes the resident bytes before each."""

  def __init__(self, times: int):
    super().__init__()
    self._times, self.sizes = times, []

  def readline(self) -> str:
    """Returns the next prompt, and at last an empty line."""
    self.sizes.append(resident_bytes())
    num_words = 1 + len(self.sizes) % 5
    return (
      "one " * num_words + "two\n" if len(self.sizes) <= self._times else ""
    )


def measure(kind: str, times: int) -> list[int]:
  """Repeats a kind in this process; returns the resident bytes after each.

  Raises:
    UserError: the run failed, and has said why.
  """
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before its import
  from tests import runs

  with (
    tempfile.TemporaryDirectory() as folder,
    contextlib.redirect_stdout(sys.stderr),
    contextlib.ExitStack() as stack,
  ):
    if "rewinds" in kind:
      stack.enter_context(spikes_in_every_second_step())
    if kind == "task evaluations":
      add_task()
    model_dir, macros = Path(folder) / "run", macros_of(kind, times)
    corpus = runs.write_corpus(Path(folder) / "corpus")
    code = runs.run("train", corpus, model_dir, **macros)
    if kind == "prompts" and not code:
      flags = [f"--model_dir={model_dir}", "--interactive"]
      prompts = Prompts(times)
      with unittest.mock.patch("sys.stdin", prompts):
        code = runs.main(["generate", *flags, "--gin.SAMPLE_TOKENS=8"])
    if code:
      raise UserError(f"{kind}: the run failed.")
    if kind == "prompts":
      return prompts.sizes[1:]
    lines = runs.read_metrics(model_dir)
  fields = ["host_memory_bytes"]
  if kind == "rewinds of pods":
    fields = [f"host_memory_bytes/pod_{pod}" for pod in range(2)]
  return [max(line[x] for x in fields) for line in lines][-times:]


def measure_apart(kind: str, times: int) -> list[int]:
  """Measures in a new process."""
  new = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(1, mp_context=new) as processes:
    return processes.submit(measure, kind, times).result()


def growth(sizes: Sequence[int]) -> float:
  """Returns by what share the last is more than the tenth."""
  return sizes[-1] / sizes[_TENTH - 1] - 1


def row(kind: str, sizes: Sequence[int]) -> str:
  """Returns a line of the table, in MB."""
  some = [sizes[n - 1] / 1e6 if n <= len(sizes) else None for n in _COLUMNS]
  cells = "".join(f"{x:>9.1f}" if x else " " * 9 for x in some)
  last = f"{sizes[-1] / 1e6:>9.1f}{growth(sizes):>9.2%}"
  return f"{kind:<18}{len(sizes):>6,}{cells}{last}"


@one_line_errors
def main() -> None:
  """Prints a line for each kind."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--only", action="append", help=f"of {', '.join(TIMES)}; else all")
  add("--times", type=int, help="repetitions of each kind")
  add("--json", action="store_true", help="print one object a line")
  chosen = parser.parse_args()
  if chosen.times is not None:
    check_count("--times", chosen.times, minimum=_TENTH)
  for kind in chosen.only or []:
    check_choice("--only", kind, TIMES)
  if not chosen.json:
    heads = "".join(f"{n:>9,}" for n in _COLUMNS)
    print(f"{'MB after':<18}{'times':>6}{heads}     last   growth", flush=True)
  for kind in chosen.only or TIMES:
    sizes = measure_apart(kind, chosen.times or TIMES[kind])
    record = {"kind": kind, "bytes": sizes, "growth": round(growth(sizes), 5)}
    print(json.dumps(record) if chosen.json else row(kind, sizes), flush=True)


if __name__ == "__main__":
  sys.exit(main())
