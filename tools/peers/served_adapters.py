# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Starts a server of a model and its adapters; a turn is a batch of requests.

python served_adapters.py --program llama_cpp --names base,a,b \
  -- llama-server --model base.gguf --lora a.gguf,b.gguf ...

The command after "--" starts the server, which must listen at --port. The first
of --names is the base. A turn has two halves: --texts requests to the base at
the same time, then as many to the adapters, one after another.
"""

import argparse
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from turns import take_turns

PROGRAMS = ("palm_mtf", "llama_cpp", "vllm")
_START_SECS = 300  # vLLM reads its modules for a minute
# Texts of different beginnings, so that no server reads one prompt for several.
_PROMPT = "{} people were asked how a river finds its way to the sea. They said"


def fields(program: str, names: Sequence[str], model: int) -> dict:
  """Returns what a request of a program adds to choose a model by number.

  llama.cpp has no names of adapters: a request scales each.
  """
  if program == "llama_cpp":
    scales = [
      {"id": i, "scale": float(i + 1 == model)} for i in range(len(names) - 1)
    ]
    return {"ignore_eos": True, "cache_prompt": False, "lora": scales}
  ends = {"ignore_eos": True} if program == "vllm" else {}
  return {"model": names[model], **ends}


def ask(port: int, request: Mapping[str, object]) -> int:
  """Requests a completion; returns its number of tokens."""
  head = {"Content-Type": "application/json"}
  with contextlib.closing(
    http.client.HTTPConnection("127.0.0.1", port)
  ) as connection:
    connection.request("POST", "/v1/completions", json.dumps(request), head)
    answer = json.load(connection.getresponse())
  if "usage" not in answer:
    raise SystemExit(f"the server has answered {answer}")
  return answer["usage"]["completion_tokens"]


@contextlib.contextmanager
def server(command: Sequence[str], port: int) -> Iterator[None]:
  """Starts a server, waits until it answers, and ends it."""
  process = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)
  try:
    last = time.monotonic() + _START_SECS
    while not is_ready(port):
      if process.poll() is not None or time.monotonic() > last:
        raise SystemExit(f"{command[0]} does not answer")
      time.sleep(0.5)
    yield
  finally:
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
      os.killpg(process.pid, signal.SIGTERM)
    process.wait()


def is_ready(port: int) -> bool:
  """Returns whether a server answers at a port."""
  try:
    with contextlib.closing(
      http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    ) as connection:
      connection.request("GET", "/v1/models")
      return connection.getresponse().status == 200
  except OSError:
    return False


def main() -> None:
  """Reads flags, starts the server, and takes turns."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--program", choices=PROGRAMS, required=True)
  parser.add_argument("--names", required=True)
  parser.add_argument("--port", type=int, required=True)
  parser.add_argument("--texts", type=int, default=16)
  parser.add_argument("--tokens", type=int, default=64)
  parser.add_argument("command", nargs="+")
  chosen = parser.parse_args()
  names, port = chosen.names.split(","), chosen.port
  last = 0

  def half(models: Sequence[int], pool: ThreadPoolExecutor) -> float:
    nonlocal last
    requests = []
    for model in models:
      last += 1
      requests.append(
        {
          "prompt": _PROMPT.format(last),
          "max_tokens": chosen.tokens,
          "temperature": 0,
          **fields(chosen.program, names, model),
        }
      )
    start = time.perf_counter()
    tokens = sum(pool.map(lambda x: ask(port, x), requests))
    return tokens / (time.perf_counter() - start)

  adapters = [1 + i % (len(names) - 1) for i in range(chosen.texts)]
  # The default action of SIGTERM would leave the server running.
  signal.signal(signal.SIGTERM, lambda *unused: sys.exit(1))
  # The server ends first, so that no request keeps the pool waiting.
  with (
    ThreadPoolExecutor(chosen.texts) as pool,
    server(chosen.command, port),
  ):

    def turn() -> dict[str, float]:
      return {
        "base_per_sec": half([0] * chosen.texts, pool),
        "adapters_per_sec": half(adapters, pool),
      }

    turn()  # warms up
    take_turns(turn, {})


if __name__ == "__main__":
  main()
