# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures how the memory of a process grows with repetitions of its work.

  python -m tools.bench memory
  python -m tools.bench memory --only rewinds --times 40 --json

  samples           of SAMPLE_STEPS: one decoder each
  batch sizes       changes of GLOBAL_BATCH_SIZE: one training program each
  rewinds           after loss spikes: one training program each
  rewinds of pods   rewinds with two pods; the memory of the larger server
  task evaluations  of TASK_EVAL_STEPS: predictions and scores
  prompts           of one `palm_mtf generate --interactive`

Resident bytes come from metrics.jsonl; ps(1) calls them RSS. Every kind is
measured in a new process, on a model of one layer.
"""

import argparse
import contextlib
import io
import os
import sys
import tempfile
import unittest.mock
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from palm_mtf.errors import UserError
from palm_mtf.machine.host_memory import resident_bytes
from tools.bench import command
from tools.bench.command import SEVERAL, Flag, count

TIMES = {
  "samples": 1000,
  "batch sizes": 50,
  "rewinds": 20,
  "rewinds of pods": 20,
  "task evaluations": 200,
  "prompts": 1000,
}
# The table has a column for these numbers of repetitions; growth is from the
# tenth repetition on.
_COLUMNS = (1, 10, 20, 50, 200)
_TENTH = 10
HEAD = (
  f"{'MB after':<18}{'times':>6}{''.join(f'{n:>9,}' for n in _COLUMNS)}"
  "     last   growth"
)
_NEVER = 10**6
# A step repeats the kind once, and writes a line to metrics.jsonl.
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
FLAGS = {
  "--only": Flag(None, f"one of {', '.join(TIMES)}; else all", TIMES, SEVERAL),
  "--times": Flag(None, "repetitions of each kind", count(_TENTH)),
}


def make_macros(kind: str, times: int) -> dict[str, object]:
  """Returns the macros of a run that repeats a kind `times` times."""
  sizes = [[step, 4 + 4 * (step % 2)] for step in range(times)]
  own = {
    "samples": {"SAMPLE_STEPS": 1, "PROMPTS": ["one two"]},
    "batch sizes": {"GLOBAL_BATCH_SIZE": sizes},
    "rewinds": _REWINDS,
    "rewinds of pods": {**_REWINDS, "NUM_PODS": 2, "PODS": "local_servers"},
    "task evaluations": {"EVAL_TASKS": ["counting"], "TASK_EVAL_STEPS": 1},
    "prompts": {},
  }
  # A change of the batch size needs a step before and a step after.
  steps = {"batch sizes": times + 1, "prompts": 1}.get(kind, times)
  return {"TRAIN_STEPS": steps, **_QUIET, **own[kind]}


@contextlib.contextmanager
def spikes_in_every_second_step():
  """Makes each training loop see a loss spike in its second step."""
  from palm_mtf.training.loss_spikes import SpikePolicy

  real = SpikePolicy.sees_spike

  def sees_spike(self: SpikePolicy, metrics: Mapping[str, float]) -> bool:
    real(self, metrics)
    self.num_seen = getattr(self, "num_seen", 0) + 1
    return self.num_seen == 2

  with unittest.mock.patch.object(SpikePolicy, "sees_spike", sees_spike):
    yield


def add_task() -> None:
  """Registers the task "counting", with metrics of scores and predictions."""
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
  """Lines for --interactive; records the resident bytes before each line."""

  def __init__(self, times: int):
    super().__init__()
    self._times, self.sizes = times, []

  def readline(self) -> str:
    """Returns the next prompt, and an empty text at the end."""
    self.sizes.append(resident_bytes())
    num_words = 1 + len(self.sizes) % 5
    return (
      "one " * num_words + "two\n" if len(self.sizes) <= self._times else ""
    )


def work(kind: str, times: int) -> list[int]:
  """Repeats a kind in this process; returns the resident bytes after each.

  Raises:
    UserError: if the run failed; the reason is on stderr.
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
    model_dir, macros = Path(folder) / "run", make_macros(kind, times)
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


def compute_growth(sizes: Sequence[int]) -> float:
  """Returns the growth from the tenth to the last size, as a share."""
  return sizes[-1] / sizes[_TENTH - 1] - 1


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields a record per kind."""
  for kind in chosen.only or TIMES:
    times = chosen.times or TIMES[kind]
    sizes = command.measure_apart("memory", kind=kind, times=times)
    growth = round(compute_growth(sizes), 5)
    yield {"kind": kind, "bytes": sizes, "growth": growth}


def row(record: dict) -> str:
  """Returns a line of the table, in MB."""
  sizes = [x / 1e6 for x in record["bytes"]]
  cells = "".join(
    f"{sizes[n - 1]:>9.1f}" if n <= len(sizes) else " " * 9 for n in _COLUMNS
  )
  last = f"{sizes[-1]:>9.1f}{record['growth']:>9.2%}"
  return f"{record['kind']:<18}{len(sizes):>6,}{cells}{last}"
