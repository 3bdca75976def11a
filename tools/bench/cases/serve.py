# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures the tokens per second of `palm_mtf serve` and of `generate`.

  python -m tools.bench serve --model_dir runs/quickstart
  python -m tools.bench serve --model_dir runs/quickstart --requests 1 8 --json

Requests have different random prompts and come at the same time; decoding is
greedy. What is compiled at first use is not timed.
"""

import argparse
import http.client
import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import numpy as np

from palm_mtf.checkpoints.weights_to_load import open_newest
from palm_mtf.cli.gin_files import load_run
from palm_mtf.console import configure_logging
from palm_mtf.errors import UserError
from palm_mtf.generation.inference.prompts import open_generator
from tools.bench.command import REQUIRED, Flag, count
from tools.bench.pairs import POSITIVE, time_call

_ROUNDS = 3  # the median counts
_MACROS = {"TEMPERATURE": 0.0, "STOP_STRINGS": [], "PROMPT_LOOKUP": False}
BOUNDS = dict.fromkeys(("served", "generated"), POSITIVE)
HEAD = f"{'requests':>8}  {'served/s':>10}  {'generated/s':>11}"
FLAGS = {
  "--model_dir": Flag(None, "a training run", settings=REQUIRED),
  "--requests": Flag(
    None, "numbers at the same time; else 1 4 16", count(), {"nargs": "+"}
  ),
}


@contextmanager
def serving(flags: Sequence[str], slots: int) -> Iterator[str]:
  """Starts a server, yields its HOST:PORT, and stops the server."""
  command = [sys.executable, "-m", "palm_mtf", "serve", *flags]
  command += ["--listen=127.0.0.1:0", f"--slots={slots}"]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    line = process.stdout.readline()
    if not line:  # the server has logged the reason
      raise UserError("palm_mtf serve has ended; see above.")
    try:
      yield line.split("//")[1].split("/")[0]
    finally:
      process.send_signal(signal.SIGTERM)


def ask(server: str, prompt: Sequence[int]) -> int:
  """Requests a completion; returns its number of tokens."""
  body = json.dumps({"prompt": list(prompt)})
  head = {"Content-Type": "application/json"}
  with closing(http.client.HTTPConnection(server)) as connection:
    connection.request("POST", "/v1/completions", body, head)
    answer = json.load(connection.getresponse())
  return answer["usage"]["completion_tokens"]


def measure_speed(run: Callable[[], int]) -> float:
  """Returns the median tokens per second; `run` returns its tokens."""
  run()
  rates = []
  for _ in range(_ROUNDS):
    counts: list[int] = []
    secs = time_call(lambda counts=counts: counts.append(run()))
    rates.append(counts[0] / secs)
  return statistics.median(rates)


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields a record per number of requests, after all are measured."""
  configure_logging()
  model_dir, counts = chosen.model_dir, chosen.requests or [1, 4, 16]
  _, config = load_run("generate", model_dir, _MACROS)
  model, run = config.model, config.run
  checkpoint, vocabulary = open_newest(model_dir, config)
  length = (model.sequence_length - run.sample_tokens) // 2
  ids = np.random.default_rng(0).integers(
    3, vocabulary.size, [max(counts), length]
  )
  prompts = ids.tolist()
  records = [{"requests": x} for x in counts]
  flags = [f"--model_dir={model_dir}"]
  flags += [f"--gin.{name}={value!r}" for name, value in _MACROS.items()]
  with serving(flags, max(counts)) as server:
    for record in records:
      some = prompts[: record["requests"]]
      with ThreadPoolExecutor(len(some)) as pool:
        record["served"] = measure_speed(
          lambda pool=pool, some=some: sum(
            pool.map(lambda prompt: ask(server, prompt), some)
          )
        )
  with open_generator(checkpoint, config, vocabulary) as generator:
    for record in records:
      some = prompts[: record["requests"]]
      record["generated"] = measure_speed(
        lambda some=some: sum(
          each.num_tokens for (each,) in generator.continue_tokens(some)
        )
      )
  yield from records


def row(record: dict) -> str:
  """Returns a line of the table."""
  requests, served, made = record.values()
  return f"{requests:8}  {served:10,.0f}  {made:11,.0f}"
