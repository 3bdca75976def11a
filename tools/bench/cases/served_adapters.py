# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares servers: requests for several adapters of a model at the same time.

  python -m tools.bench served_adapters --model_dir runs/adapted
  python -m tools.bench served_adapters --model_dir runs/adapted \
    --llama_cpp FOLDER --vllm PYTHON --bits 16,8

The model of a run is exported to each server, with copies of its adapter. All
servers are up and take turns: texts of the base at the same time, then texts
of the adapters. A ratio is that of two halves of one turn, or of two turns next
to each other.
"""

import argparse
import contextlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from palm_mtf.cli.gin_files import load_run
from palm_mtf.errors import UserError
from tools.bench import pairs
from tools.bench.command import REQUIRED, Flag, choices

_SCRIPT = Path(__file__).parent.parent.parent / "peers" / "served_adapters.py"
_OURS = {16: "activation", 8: "int8", 4: "int4"}
_LLAMA_CPP = {16: "BF16", 8: "Q8_0", 4: "Q4_0"}
_LENGTH = 256  # most tokens of prompt and completion
BOUNDS = dict.fromkeys(("*per_sec", "*share", "ratio"), pairs.POSITIVE)
HEAD = (
  f"{'server':<10} {'bits':>4} {'base/s':>8} {'adapters/s':>10} {'share':>6}"
  "  adapters: ratio of ours to it"
)
FLAGS = {
  "--model_dir": Flag(None, "an adapted run", settings=REQUIRED),
  "--bits": Flag("16", "bits per weight", choices([*map(str, _OURS)])),
  "--adapters": Flag(8, "copies of the adapter"),
  "--texts": Flag(16, "at the same time"),
  "--rounds": Flag(8, "turns of each server"),
  "--llama_cpp": Flag("", "folder of llama-server and llama-quantize"),
  "--vllm": Flag("", "a Python that has vLLM"),
}


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields a record per server and number of bits."""
  _, config = load_run("generate", chosen.model_dir, {})
  if config.model.adapter != "lora":
    raise UserError(
      f"--model_dir = {chosen.model_dir}: is no run with ADAPTER = 'lora'; "
      "give one."
    )
  base = Path(config.run.init_checkpoint)  # a MODEL_DIR
  with tempfile.TemporaryDirectory() as made:
    folder = Path(made)
    _export(chosen, base, folder)
    for bits in map(int, chosen.bits):
      commands = dict(_commands(chosen, base, folder, bits))
      with contextlib.ExitStack() as stack:
        programs = [
          stack.enter_context(pairs.Program(name, command))
          for name, command in commands.items()
        ]
        turns = pairs.alternate(programs, chosen.rounds)
      yield from _records(turns, bits)


def _export(chosen: argparse.Namespace, base: Path, folder: Path) -> None:
  """Writes the model and the adapters for each server."""

  def export(name: str, source: str | Path, *flags: str) -> Path:
    command = [sys.executable, "-m", "palm_mtf", "export", *flags]
    command += [f"--model_dir={source}", f"--output={folder / name}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / name

  adapter = export("adapter", chosen.model_dir)
  for number in range(chosen.adapters):
    shutil.copytree(adapter, folder / f"adapter{number}")
  if chosen.vllm:
    export("base", base)
  if chosen.llama_cpp:
    export("base.gguf", base, "--format=gguf")
    adapter = export("adapter.gguf", chosen.model_dir, "--format=gguf")
    for number in range(chosen.adapters):
      shutil.copy(adapter, folder / f"adapter{number}.gguf")


def _commands(
  chosen: argparse.Namespace, base: Path, folder: Path, bits: int
) -> Iterator[tuple[str, list[str]]]:
  """Yields the name of each server and the command that starts its program."""
  adapters = [f"adapter{x}" for x in range(chosen.adapters)]

  def program(name: str, base_name: str, own: Sequence[object]):
    port = free_port()
    command = [sys.executable, _SCRIPT, f"--program={name}", f"--port={port}"]
    command += [f"--names={','.join([base_name, *adapters])}"]
    command += [f"--texts={chosen.texts}", "--"]
    return name, [str(x).format(port=port) for x in [*command, *own]]

  yield program(
    "palm_mtf",
    base.name,
    [
      *(sys.executable, "-m", "palm_mtf", "serve", f"--model_dir={base}"),
      *(f"--adapter={x}={folder / x}" for x in adapters),
      *("--listen=127.0.0.1:{port}", f"--slots={chosen.texts}"),
      *(f"--gin.WEIGHT_DTYPE={_OURS[bits]!r}", "--gin.PROMPT_LOOKUP=False"),
    ],
  )
  if chosen.llama_cpp:
    name, made = _LLAMA_CPP[bits], folder / f"base_{bits}.gguf"
    bin_ = Path(chosen.llama_cpp)
    subprocess.run(
      [bin_ / "llama-quantize", folder / "base.gguf", made, name],
      check=True,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )
    yield program(
      "llama_cpp",
      "base",
      [
        *(bin_ / "llama-server", "--model", made),
        *("--lora", ",".join(str(folder / f"{x}.gguf") for x in adapters)),
        *("--host", "127.0.0.1", "--port", "{port}", "--parallel"),
        *(chosen.texts, "--ctx-size", chosen.texts * _LENGTH),
        *("--threads", 2, "--no-warmup", "--log-verbosity", -1),
      ],
    )
  if chosen.vllm and bits == 16:
    modules = [f"{x}={folder / x}" for x in adapters]
    yield program(
      "vllm",
      "base",
      [
        *(chosen.vllm, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", folder / "base", "--served-model-name", "base"),
        *("--host", "127.0.0.1", "--port", "{port}", "--dtype", "bfloat16"),
        *("--enable-lora", "--lora-modules", *modules),
        *("--max-loras", len(adapters), "--max-num-seqs", chosen.texts),
        *("--max-model-len", _LENGTH, "--no-enable-prefix-caching"),
      ],
    )


def free_port() -> int:
  """Returns a port that no server has now."""
  with socket.create_server(("127.0.0.1", 0)) as free:
    return free.getsockname()[1]


def _records(turns: dict[str, list[pairs.Turn]], bits: int) -> Iterator[dict]:
  ours = [x.values["adapters_per_sec"] for x in turns["palm_mtf"]]
  for name, own in turns.items():
    base, adapters = (
      [x.values[key] for x in own]
      for key in ("base_per_sec", "adapters_per_sec")
    )
    yield {
      "server": name,
      "bits": bits,
      "base_per_sec": statistics.median(base),
      "adapters_per_sec": statistics.median(adapters),
      "share": statistics.median(
        y / x for x, y in zip(base, adapters, strict=True)
      ),
      "ratio": statistics.median(
        x / y for x, y in zip(ours, adapters, strict=True)
      ),
    }


def row(record: dict) -> str:
  """Returns a line of the table."""
  server, bits, base, adapters, share, ratio = record.values()
  return (
    f"{server:<10} {bits:>4} {base:>8,.0f} {adapters:>10,.0f} {share:>6.2f}"
    f"  {ratio:.2f}"
  )
