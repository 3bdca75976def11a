# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the speed of decoding with other programs, at equal bits a weight.

  python tools/bench_decode.py
  python tools/bench_decode.py --size 125M --bits 8,4
  python tools/bench_decode.py --peer llama_cpp,onnx --peer_python PYTHON
  python tools/bench_decode.py --attention --sequence_length 4096

Results are on stdout, progress is on stderr.
"""

# Every program decodes the same architecture with random weights greedily
# behind a prompt of a quarter of the sequence; a turn is one continuation, and
# reading the prompt is not timed. `--attention` compares multi-query with
# multi-head attention, both ours.

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator

from bench_command import one_line_errors
from bench_pairs import race, rows
from bench_peers import (
  SIZES,
  benchmark_config,
  num_parameters,
  peer_command,
  read_arguments,
  table,
)
from peers.turns import take_turns

from palm_mtf.config import DecodeConfig, MeshLayout, PalmConfig
from palm_mtf.errors import check_choice, check_count
from palm_mtf.machine.activation_dtype import fast_dtype_here
from palm_mtf.machine.process import own_process

# Dtypes by bits a weight.
OURS = {32: "float32", 16: "bfloat16", 8: "int8", 4: "int4"}
_TORCH_AND_JAX = {32: "float32", 16: "bfloat16"}
# Each peer's program, its dtypes, and the modules that it imports.
PEERS = {
  "torch": ("torch_decode.py", _TORCH_AND_JAX, ["torch"]),
  "jax": ("jax_decode.py", _TORCH_AND_JAX, ["jax"]),
  "llama_cpp": (
    "llama_cpp_decode.py",
    {32: "float32", 16: "float16", 8: "q8_0", 4: "q4_0"},
    ["llama_cpp"],
  ),
  "onnx": (
    "onnx_decode.py",
    {32: "float32", 8: "int8", 4: "int4"},
    ["onnx", "onnxruntime"],
  ),
}


@dataclasses.dataclass(frozen=True)
class Task:
  """What is decoded.

  Attributes:
    size: one of SIZES.
    sequence_length: tokens of prompt and continuation.
    batch_size: number of prompts.
    attention: "multi_query" or "multi_head".
  """

  size: str
  sequence_length: int
  batch_size: int
  attention: str = "multi_query"

  @property
  def prompt_tokens(self) -> int:
    """Tokens of a prompt: a quarter of the sequence."""
    return self.sequence_length // 4

  @property
  def timed_tokens(self) -> int:
    """Tokens of a turn: the first one comes with the prompt."""
    steps = self.sequence_length - self.prompt_tokens - 1
    return self.batch_size * steps

  def config(self, dtype: str) -> PalmConfig:
    """Returns the architecture; quantized weights have the fast activations."""
    is_quantized = dtype in ("int8", "int4")
    return dataclasses.replace(
      benchmark_config(fast_dtype_here() if is_quantized else dtype, self.size),
      sequence_length=self.sequence_length,
      attention=self.attention,
    )


@contextlib.contextmanager
def decoding(task: Task, dtype: str) -> Iterator[tuple]:
  """Yields a session, a program of random weights, and what `start` is fed."""
  import numpy as np

  from palm_mtf._tf import tf
  from palm_mtf.generation.decode.generate_program import (
    PromptBatch,
    build_decode_program,
  )
  from palm_mtf.generation.decode.weights import build_decode_model
  from palm_mtf.generation.inference.sessions import (
    load_weights,
    step_session_config,
  )

  config = task.config(dtype)
  mesh = MeshLayout(mesh_shape="", layout="")
  # [eod] is an id that is never chosen: no row ends early.
  sizes = PromptBatch(
    num_prompts=task.batch_size,
    prompt_tokens=task.prompt_tokens,
    max_tokens=task.sequence_length - task.prompt_tokens,
    num_tokens=config.vocab_size - 1,
    eod_id=config.vocab_size - 1,
  )
  weight_dtype = dtype if dtype in ("int8", "int4") else "activation"
  session_config = step_session_config(config, mesh, weight_dtype)
  with tf.Graph().as_default(), tf.Session(config=session_config) as session:
    model = build_decode_model(config, mesh, weight_dtype)
    program = build_decode_program(model, DecodeConfig(temperature=0.0), sizes)
    load_weights(
      session,
      model,
      lambda slices: session.run(
        [
          part.variable.assign(0.04 * tf.random.normal(part.variable.shape))
          for parts in slices.values()
          for part in parts
        ]
      ),
    )
    yield (
      session,
      program,
      {
        program.prompts: np.random.default_rng(0).integers(
          sizes.num_tokens, size=[task.batch_size, task.prompt_tokens]
        ),
        program.lengths: [task.prompt_tokens] * task.batch_size,
        program.keys: np.zeros([task.batch_size, 1, 2]),
      },
    )


def choose_first_tokens(session, program, feed) -> None:
  """Reads the prompts of a program, and gives each its first new token."""
  session.run(program.start, feed)
  session.run(program.advance, {program.limit: 1})


def run_ours(task: Task, dtype: str) -> None:
  """Takes turns: a continuation of all prompts each."""
  own_process()  # as commands do
  with decoding(task, dtype) as (session, program, feed):
    to_the_end = {program.limit: task.sequence_length - task.prompt_tokens}

    def turn() -> dict[str, float]:
      choose_first_tokens(session, program, feed)
      start = time.perf_counter()
      session.run(program.advance, to_the_end)
      return {"secs": time.perf_counter() - start}

    turn()  # compiles
    take_turns(turn, {"parameters": num_parameters(task.config(dtype))})


def our_command(task: Task, dtype: str) -> list[str]:
  """Returns the command line that decodes with palm_mtf."""
  values = {"worker": dtype, **dataclasses.asdict(task)}
  values["worker_attention"] = values.pop("attention")
  flags = [f"--{name}={value}" for name, value in values.items()]
  return [sys.executable, __file__, *flags]


def write_gguf(task: Task, folder: str) -> str:
  """Writes a model of llama.cpp with random weights; returns its path."""
  import numpy as np

  from palm_mtf.export import gguf
  from palm_mtf.export.huggingface.weights import tensor_shapes

  config = task.config("float32")
  shapes = tensor_shapes(config)
  rng = np.random.default_rng(0)
  path = os.path.join(folder, "model.gguf")
  gguf.write_gguf(
    path,
    {
      **gguf.model_metadata(config, "float32"),
      "tokenizer.ggml.model": "no_vocab",
    },
    shapes,
    "float32",
    lambda name: rng.normal(0, 0.04, shapes[name]).astype(np.float32),
  )
  return path


def races(
  arguments: argparse.Namespace, task: Task, folder: str
) -> Iterator[dict[tuple[str, str], list[str]]]:
  """Yields command lines of programs that take turns with one another."""
  if arguments.attention:
    yield {
      (each, "bfloat16"): our_command(
        dataclasses.replace(task, attention=each), "bfloat16"
      )
      for each in ("multi_query", "multi_head")
    }
    return
  gguf = write_gguf(task, folder) if "llama_cpp" in arguments.peer else ""
  for bits in arguments.bits:
    commands = {("ours", OURS[bits]): our_command(task, OURS[bits])}
    for name in arguments.peer:
      program, dtypes, _ = PEERS[name]
      if bits in dtypes:
        own = {"model": gguf} if name == "llama_cpp" else {}
        commands[name, dtypes[bits]] = peer_command(
          arguments.peer_python,
          [program],
          SIZES[task.size] | {"sequence_length": task.sequence_length},
          prompt_tokens=task.prompt_tokens,
          batch_size=task.batch_size,
          dtype=dtypes[bits],
          **own,
        )
    yield commands


@one_line_errors
def main() -> None:
  """Compares, or takes turns as a program of a comparison."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--batch_size", type=int, default=1, help="prompts at once")
  add("--sequence_length", type=int, default=256, help="a quarter is prompt")
  add("--bits", default="32,16,8,4", help="bits a weight, some of these")
  add("--attention", action="store_true", help="compare both attentions")
  add("--worker", choices=OURS.values(), help=argparse.SUPPRESS)
  add("--worker_attention", default="multi_query", help=argparse.SUPPRESS)
  modules_of = {name: modules for name, (_, _, modules) in PEERS.items()}
  arguments = read_arguments(parser, modules_of)
  for name in ("batch_size", "rounds"):
    check_count(f"--{name}", getattr(arguments, name))
  check_count("--sequence_length", arguments.sequence_length, minimum=8)
  by_text = {str(bits): bits for bits in OURS}
  for text in arguments.bits.split(","):
    check_choice("--bits", text, by_text)
  arguments.bits = [by_text[text] for text in arguments.bits.split(",")]
  task = Task(
    arguments.size,
    arguments.sequence_length,
    arguments.batch_size,
    arguments.worker_attention,
  )
  if arguments.worker:
    run_ours(task, arguments.worker)
    return
  with tempfile.TemporaryDirectory() as folder:
    for commands in races(arguments, task, folder):
      found = rows(race(commands, arguments.rounds), task.timed_tokens)
      lines = [json.dumps({**x, **dataclasses.asdict(task)}) for x in found]
      for line in lines if arguments.json else table(found):
        print(line, flush=True)


if __name__ == "__main__":
  sys.exit(main())
