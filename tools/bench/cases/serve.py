# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares servers: tokens per second, first token, and time between tokens.

  python -m tools.bench serve --model_dir runs/quickstart
  python -m tools.bench serve --model_dir runs/quickstart --weight_dtype int8 \
    --llama_cpp llama-server --gguf model.gguf --vllm vllm --hf exported \
    --before CHECKOUT
  python -m tools.bench serve --model_dir runs/quickstart --requests 4 --long 2

All servers are up and take turns. In a turn, clients stream completions of
different random prompts, greedily, all at the same time. With --long, so many
long prompts arrive while the others are written, one after another; the figures
are those of the other texts, but for "long", the long prompts' first token.
What is compiled at first use is not timed.
"""

import argparse
import http.client
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from palm_mtf.checkpoints.weights_to_load import open_newest
from palm_mtf.cli.gin_files import load_run
from palm_mtf.errors import UserError
from palm_mtf.machine.processors import usable_cores
from tools.bench.command import REQUIRED, Flag, checkout, count
from tools.bench.pairs import POSITIVE
from tools.bench.streams import Stream, run_streams

_MACROS = {"TEMPERATURE": 0.0, "STOP_STRINGS": [], "PROMPT_LOOKUP": False}
_START_SECS = 1200  # on a busy machine
_LONG_EVERY = 0.25  # seconds between the arrivals of long prompts
_VLLM_CACHE_GIB = 1  # by default vllm takes a part of the machine's memory
BOUNDS = dict.fromkeys(("*per_sec", "*_ms", "events", "*ratio"), POSITIVE)
HEAD = (
  f"{'server':<10} {'requests':>8} {'tokens/s':>9} {'first, ms: 50%':>14} "
  f"{'99%':>7} {'between: 50%':>12} {'99%':>7} {'events/64':>9} {'long':>7}"
  "  ratios of ours: tokens/s, first 50% 99%, between 50% 99%"
)
FLAGS = {
  "--model_dir": Flag(None, "a training run", settings=REQUIRED),
  "--requests": Flag(
    None, "numbers at the same time; else 1 4 16", count(), {"nargs": "+"}
  ),
  "--prompt_tokens": Flag(32, "length of prompts"),
  "--tokens": Flag(64, "length of completions"),
  "--long": Flag(0, "long prompts that arrive meanwhile", count(0)),
  "--long_tokens": Flag(2000, "length of long prompts"),
  "--weight_dtype": Flag("activation", "WEIGHT_DTYPE of palm_mtf serve"),
  "--rounds": Flag(5, "turns of each server"),
  "--before": Flag("", "another checkout of palm_mtf, as a server"),
  "--llama_cpp": Flag("", "path of llama-server; needs --gguf"),
  "--gguf": Flag("", "the run's model for llama-server"),
  "--vllm": Flag("", "path of vllm, built for CPUs; needs --hf"),
  "--hf": Flag("", "the run's export for vllm, which computes in bfloat16"),
}


class _Server(NamedTuple):
  port: int
  fields: dict  # of requests, besides those of all servers


@contextmanager
def _serving(
  command: Sequence[object], port: int, folder: str | None = None
) -> Iterator[None]:
  """Starts a server, waits until it answers, and stops it."""
  with subprocess.Popen(
    [*map(str, command)],
    stdout=subprocess.DEVNULL,
    cwd=folder,
  ) as process:
    try:
      last = time.monotonic() + _START_SECS
      while not _is_ready(port):
        if process.poll() is not None or time.monotonic() > last:
          raise UserError(f"{command[0]} does not answer; see above.")
        time.sleep(0.2)
      yield
    finally:
      process.send_signal(signal.SIGTERM)


def _is_ready(port: int) -> bool:
  with (
    suppress(OSError, http.client.HTTPException),
    closing(http.client.HTTPConnection("127.0.0.1", port)) as connection,
  ):
    connection.request("GET", "/health")
    return connection.getresponse().status == 200
  return False


def _free_port() -> int:
  """Returns a port that no server has now."""
  with socket.create_server(("127.0.0.1", 0)) as free:
    return free.getsockname()[1]


def _commands(
  chosen: argparse.Namespace, slots: int, length: int
) -> Iterator[tuple[str, int, list[object], str | None, dict]]:
  """Yields name, port, command, folder and fields of requests of a server."""
  checkouts = {"palm_mtf": None}
  if chosen.before:
    folder = checkout("--before", chosen.before).parent.parent
    checkouts["before"] = str(folder)
  macros = {**_MACROS, "WEIGHT_DTYPE": chosen.weight_dtype}
  for name, folder in checkouts.items():
    port = _free_port()
    command = [sys.executable, "-m", "palm_mtf", "serve"]
    command += [f"--model_dir={Path(chosen.model_dir).resolve()}"]
    command += [f"--listen=127.0.0.1:{port}", f"--slots={slots}"]
    command += [f"--gin.{x}={y!r}" for x, y in macros.items()]
    yield name, port, command, folder, {}
  if chosen.llama_cpp:
    port = _free_port()
    command = [chosen.llama_cpp, "--model", chosen.gguf, "--no-warmup"]
    command += ["--host", "127.0.0.1", "--port", port, "--parallel", slots]
    command += ["--ctx-size", slots * length, "--log-verbosity", -1]
    command += ["--threads", usable_cores()]
    fields = {"ignore_eos": True, "cache_prompt": False}
    yield "llama_cpp", port, command, None, fields
  if chosen.vllm:
    port, folder = _free_port(), str(Path(chosen.hf).resolve())
    command = ["env", f"VLLM_CPU_KVCACHE_SPACE={_VLLM_CACHE_GIB}"]
    command += [chosen.vllm, "serve", folder, "--host", "127.0.0.1"]
    command += ["--port", port, "--dtype", "bfloat16", "--max-num-seqs", slots]
    command += ["--max-model-len", length, "--no-enable-prefix-caching"]
    # The folder of the export has no folders. In another one, vllm would take a
    # folder with the name of one of its modules for the module.
    fields = {"ignore_eos": True, "model": folder}
    yield "vllm", port, command, folder, fields


def _make_streams(
  chosen: argparse.Namespace, requests: int, seed: int, size: int
) -> tuple[list[Stream], list[Stream]]:
  """Returns the texts of a turn, and the long prompts."""
  rng = np.random.default_rng(seed)

  def make(length: int, tokens: int, start: float = 0.0) -> Stream:
    return Stream(rng.integers(3, size, [length]).tolist(), tokens, start)

  texts = [make(chosen.prompt_tokens, chosen.tokens) for _ in range(requests)]
  long = [
    make(chosen.long_tokens, 1, _LONG_EVERY * (i + 1))
    for i in range(chosen.long)
  ]
  return texts, long


def _summarize(turns: Sequence[tuple]) -> dict[str, float]:
  """Returns the figures of some turns of a server."""
  texts = [x for _, texts, _ in turns for x in texts]
  first = [1e3 * x.times[0] for x in texts]
  # A call of steps may choose a whole text, which then comes in one event.
  gaps = [1e3 * y for x in texts for y in x.gaps] or [0.0]
  tokens = sum(x.num_tokens for x in texts)
  found = {
    "tokens_per_sec": tokens / sum(secs for secs, _, _ in turns),
    "first_50_ms": float(np.percentile(first, 50)),
    "first_99_ms": float(np.percentile(first, 99)),
    "between_50_ms": float(np.percentile(gaps, 50)),
    "between_99_ms": float(np.percentile(gaps, 99)),
    "events": 64 * sum(len(x.times) for x in texts) / tokens,
  }
  if long := [1e3 * x.times[0] for _, _, long in turns for x in long]:
    found["long_ms"] = statistics.median(long)
  return found


_RATIOS = (
  *("tokens_per_sec", "first_50_ms", "first_99_ms"),
  *("between_50_ms", "between_99_ms"),
)


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields a record per number of requests and server."""
  counts = chosen.requests or [1, 4, 16]
  _, config = load_run("generate", chosen.model_dir, _MACROS)
  _, vocabulary = open_newest(chosen.model_dir, config)
  slots = max(counts) + chosen.long
  with ExitStack() as stack:
    servers: dict[str, _Server] = {}
    for name, port, command, folder, fields in _commands(
      chosen, slots, config.model.sequence_length
    ):
      stack.enter_context(_serving(command, port, folder))
      servers[name] = _Server(port, fields)
    for requests in counts:
      yield from _measure_turns(chosen, servers, requests, vocabulary.size)


def _measure_turns(
  chosen: argparse.Namespace,
  servers: dict[str, _Server],
  requests: int,
  size: int,
) -> Iterator[dict]:
  turns: dict[str, list[tuple]] = {name: [] for name in servers}
  for number in range(-2, chosen.rounds):  # the first two warm up
    names = [*servers]
    first = number % len(names)
    for name in [*names[first:], *names[:first]]:
      texts, long = _make_streams(chosen, requests, number + 2, size)
      own = servers[name]
      secs = run_streams(own.port, [*texts, *long], own.fields)
      if number >= 0:
        turns[name].append((secs, texts, long))
      time.sleep(0.05)
  ours = [_summarize([x]) for x in turns["palm_mtf"]]
  for name, own in turns.items():
    record = {"server": name, "requests": requests, **_summarize(own)}
    if name != "palm_mtf":
      theirs = [_summarize([x]) for x in own]
      for key in _RATIOS:
        ratios = [
          x[key] / y[key] for x, y in zip(ours, theirs, strict=True) if y[key]
        ]
        if ratios:
          record[f"{key}_ratio"] = statistics.median(ratios)
    yield record


def row(record: dict) -> str:
  """Returns a line of the table."""
  line = (
    f"{record['server']:<10} {record['requests']:>8} "
    f"{record['tokens_per_sec']:>9,.0f} {record['first_50_ms']:>14,.1f} "
    f"{record['first_99_ms']:>7,.1f} {record['between_50_ms']:>12,.2f} "
    f"{record['between_99_ms']:>7,.1f} {record['events']:>9,.1f} "
    f"{record.get('long_ms', 0):>7,.0f}"
  )
  ratios = [record.get(f"{key}_ratio") for key in _RATIOS]
  shown = ("-" if x is None else f"{x:.2f}" for x in ratios)
  return f"{line}  {' '.join(shown)}"
