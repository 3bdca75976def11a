# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures the tokens a second of `palm_mtf serve` beside those of `generate`.

  python tools/bench_serve.py --model_dir runs/quickstart
  python tools/bench_serve.py --model_dir runs/quickstart --requests 1 8 --json

Requests have random prompts of their own and come at once, greedy. What is
compiled at the first use is not timed. Results are on stdout.
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
from bench_command import one_line_errors, seconds_of

from palm_mtf.accounting.architecture import parameter_shapes
from palm_mtf.checkpoints.same_model import newest_checkpoint
from palm_mtf.cli.gin_files import load_run
from palm_mtf.config import Config
from palm_mtf.console import configure_logging
from palm_mtf.data.vocabulary.vocabulary import load_vocabulary
from palm_mtf.errors import UserError
from palm_mtf.generation.inference.prompts import open_generator

_ROUNDS = 3  # of which the median counts
Prompts = Sequence[Sequence[int]]


@contextmanager
def serving(flags: Sequence[str], slots: int) -> Iterator[str]:
  """Starts a server of its own, and stops it; yields HOST:PORT."""
  command = [sys.executable, "-m", "palm_mtf", "serve", *flags]
  command += ["--listen=127.0.0.1:0", f"--slots={slots}"]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    line = process.stdout.readline()
    if not line:  # which has said why
      raise UserError("palm_mtf serve has ended; see above.")
    try:
      yield line.split("//")[1].split("/")[0]
    finally:
      process.send_signal(signal.SIGTERM)


def ask(server: str, prompt: Sequence[int]) -> int:
  """Returns the tokens of a completion."""
  body = json.dumps({"prompt": list(prompt)})
  head = {"Content-Type": "application/json"}
  with closing(http.client.HTTPConnection(server)) as connection:
    connection.request("POST", "/v1/completions", body, head)
    answer = json.load(connection.getresponse())
  return answer["usage"]["completion_tokens"]


def tokens_per_sec(run: Callable[[], int]) -> float:
  """Returns the median over rounds of tokens that `run` makes, a second."""
  run()
  rates = []
  for _ in range(_ROUNDS):
    counts: list[int] = []
    secs = seconds_of(lambda counts=counts: counts.append(run()))
    rates.append(counts[0] / secs)
  return statistics.median(rates)


def measure(
  flags: Sequence[str], model_dir: str, config: Config, requests: Sequence[int]
) -> list[dict]:
  """Returns tokens a second of both, for each number of requests.

  Args:
    flags: flags of the model, for the server.
    model_dir: MODEL_DIR of the run.
    config: settings of `generate`.
    requests: numbers of requests at once.
  """
  model, run = config.model, config.run
  checkpoint = newest_checkpoint(model_dir, parameter_shapes(model))
  vocabulary = load_vocabulary(
    model_dir, config.data, vocab_size=model.vocab_size
  )
  length = (model.sequence_length - run.sample_tokens) // 2
  ids = np.random.default_rng(0).integers(
    3, vocabulary.size, [max(requests), length]
  )
  prompts = ids.tolist()
  records = [{"requests": count} for count in requests]
  with serving(flags, max(requests)) as server:
    for record in records:
      some = prompts[: record["requests"]]
      with ThreadPoolExecutor(len(some)) as pool:
        record["served"] = tokens_per_sec(
          lambda pool=pool, some=some: sum(
            pool.map(lambda prompt: ask(server, prompt), some)
          )
        )
  with open_generator(checkpoint, config, vocabulary) as generator:
    for record in records:
      some = prompts[: record["requests"]]
      record["generated"] = tokens_per_sec(
        lambda some=some: sum(
          each.num_tokens for (each,) in generator.continue_tokens(some)
        )
      )
  return records


@one_line_errors
def main() -> None:
  """Prints a line for each number of requests."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--model_dir", required=True, help="of a training run")
  parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
  parser.add_argument("--json", action="store_true", help="print objects")
  arguments = parser.parse_args()
  configure_logging()
  model_dir = arguments.model_dir
  macros = {"TEMPERATURE": 0.0, "STOP_STRINGS": []}
  _, config = load_run("generate", model_dir, macros)
  flags = [f"--model_dir={model_dir}"]
  flags += [f"--gin.{name}={value!r}" for name, value in macros.items()]
  records = measure(flags, model_dir, config, arguments.requests)
  if arguments.json:
    print("\n".join(map(json.dumps, records)))
    return
  print(f"{'requests':>8}  {'served/s':>10}  {'generated/s':>11}")
  for each in records:
    print(
      f"{each['requests']:8}  {each['served']:10,.0f}  "
      f"{each['generated']:11,.0f}"
    )


if __name__ == "__main__":
  sys.exit(main())
