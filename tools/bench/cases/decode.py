# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the speed of decoding with other programs, at equal bits per weight.

python -m tools.bench decode
python -m tools.bench decode --size 125M --bits 8,4
python -m tools.bench decode --peer llama_cpp,onnx --peer_python PYTHON
python -m tools.bench decode --size 1010M --sequence_length 32 --bits 16,8,4
python -m tools.bench decode --attention --sequence_length 4096
python -m tools.bench decode --block llama --size 125M --peer llama_cpp
python -m tools.bench decode --experts --batch_size 16
"""

# Every program decodes the same architecture with random weights, greedily,
# after a prompt of a quarter of the sequence. A turn is one continuation;
# reading the prompt is not timed.
#
# In each round, a loop reads memory, too (tools/peers/memory_rate.py). At batch
# 1, a step that reads a large model's weights once at the loop's rate has the
# share 1. Weights that a cache holds are read faster than memory gives them.
#
# --attention compares multi-query with multi-head attention, both in palm_mtf.
# As in Shazeer (2019), "Fast Transformer Decoding", the two models have equally
# many parameters: multi-head attention has more keys and values, so its MLP is
# narrower. --experts compares experts with one MLP, both in palm_mtf; a token
# uses equally many parameters of both models.

import argparse
import contextlib
import dataclasses
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from palm_mtf.config import DecodeConfig, MeshLayout, ModelConfig
from palm_mtf.machine.process import own_process
from palm_mtf.machine.processors import cpu_name, usable_cores
from tools.bench import models, pairs, peers
from tools.bench.command import Flag, choices, count, worker_command
from tools.peers.turns import take_turns

# Dtypes by bits per weight, and k-quants by their names.
_BLOCKS = {x: x for x in ("q4_k", "q5_k", "q6_k")}
OURS = {32: "float32", 16: "bfloat16", 8: "int8", 4: "int4", **_BLOCKS}
_QUANTIZED = ("int8", "int4", *_BLOCKS)
# D_FF of multi-head attention is a multiple of this, as fast products need. So
# the numbers of parameters differ by up to 0.2% (at 4.8M they are equal).
_D_FF_MULTIPLE, _TOLERANCE = 16, 0.002
BOUNDS = {**pairs.BOUNDS, "memory_share": pairs.POSITIVE}
_MEMORY = "memory"  # the loop's name among the programs


@dataclasses.dataclass(frozen=True)
class Task:
  """The texts to decode, and the model.

  Attributes:
    size: one of SIZES in models.py.
    sequence_length: number of tokens of prompt and continuation.
    batch_size: number of prompts.
    attention: "multi_query" or "multi_head"; None for the block's own.
    block: one of BLOCKS or PRESETS in models.py.
  """

  size: str
  sequence_length: int
  batch_size: int
  attention: str | None = None
  block: str = "palm"

  @property
  def prompt_tokens(self) -> int:
    """Number of tokens of a prompt: a quarter of the sequence."""
    return self.sequence_length // 4

  @property
  def timed_steps(self) -> int:
    """Number of steps of a turn; the first token comes with the prompt."""
    return self.sequence_length - self.prompt_tokens - 1

  @property
  def timed_tokens(self) -> int:
    """Number of tokens of a turn."""
    return self.batch_size * self.timed_steps

  def config(self, dtype: str) -> ModelConfig:
    """Returns the architecture; int8 and int4 use the fast activation dtype."""
    dtype = models.fast_dtype_here() if dtype in _QUANTIZED else dtype
    model = models.benchmark_config(dtype, self.size, self.block)
    model = dataclasses.replace(model, sequence_length=self.sequence_length)
    if self.attention is None:
      return model
    d_ff = model.d_ff
    if self.attention == "multi_head":
      # Each further head adds d_kv columns to two kernels, for keys and values.
      # Each column of d_ff is in three kernels with columns of the same length.
      columns = 2 * (model.num_heads - 1) * model.d_kv / 3
      d_ff = _D_FF_MULTIPLE * round((d_ff - columns) / _D_FF_MULTIPLE)
    return dataclasses.replace(model, attention=self.attention, d_ff=d_ff)


FLAGS = {
  **peers.SPEED_FLAGS,
  **peers.peer_flags("decode"),
  "--batch_size": Flag(1, "number of prompts"),
  "--block": Flag(
    "palm",
    "of peers: only llama_cpp has all",
    (*models.BLOCKS, *models.PRESETS),
  ),
  "--sequence_length": Flag(256, "a quarter is prompt", count(8)),
  "--bits": Flag("32,16,8,4", "bits per weight", choices([*map(str, OURS)])),
  "--attention": Flag(
    None, "compare both attentions", settings={"action": "store_true"}
  ),
  "--experts": Flag(
    None, "compare experts with one MLP", settings={"action": "store_true"}
  ),
}


_SPEEDS, _RATIO = pairs.SPEEDS_HEAD
HEAD = (
  f"{cpu_name()}, {usable_cores()} cores\n{_SPEEDS} {'MB/step':>8} "
  f"{'GB/s':>6} {'share':>6}{_RATIO}"
)


def row(record: Mapping[str, Any]) -> str:
  """Returns a line of the table of speeds."""
  if "memory_share" not in record:
    return pairs.speeds_row(record, " " * 23)
  return pairs.speeds_row(
    record,
    f" {record['step_bytes'] / 1e6:>8,.0f}"
    f" {record['read_bytes_per_sec'] / 1e9:>6.1f}"
    f" {record['memory_share']:>6.2f}",
  )


@contextlib.contextmanager
def random_weights(config: ModelConfig, dtype: str) -> Iterator[tuple]:
  """Yields a client, and a model with random weights on it."""
  from palm_mtf._tf import tf
  from palm_mtf.executors.host.step_session import step_session_config
  from palm_mtf.generation.decode.weight_maker import build_decode_model
  from palm_mtf.generation.inference.sessions import load_weights
  from palm_mtf.runtime.client.client import Client

  mesh = MeshLayout(mesh_shape="", layout="")
  weight_dtype = dtype if dtype in _QUANTIZED else "activation"
  session_config = step_session_config(config, mesh, weight_dtype)
  with tf.Graph().as_default(), tf.Session(config=session_config) as session:
    model = build_decode_model(config, mesh, weight_dtype)
    client = Client(session)
    load_weights(
      client,
      model.layers,
      lambda slices: session.run(
        [
          part.variable.assign(0.04 * tf.random.normal(part.variable.shape))
          for parts in slices.values()
          for part in parts
        ]
      ),
    )
    yield client, model


@contextlib.contextmanager
def decoding(task: Task, dtype: str) -> Iterator[tuple]:
  """Yields a client, programs, inputs of `start`, and a step's bytes.

  The weights are random. A step reads so many bytes of them, if it reads all.
  """
  import numpy as np

  from palm_mtf.generation.decode.functions import LocalPrograms
  from palm_mtf.generation.decode.generate_program import (
    PromptBatch,
    build_decode_programs,
  )
  from palm_mtf.native.decoding import PackedKernel

  config = task.config(dtype)
  # [eod] is an id that is never chosen, so that no row ends early.
  sizes = PromptBatch(
    num_prompts=task.batch_size,
    prompt_tokens=task.prompt_tokens,
    max_tokens=task.sequence_length - task.prompt_tokens,
    num_tokens=config.vocab_size - 1,
    end_ids=(config.vocab_size - 1,),
  )
  with random_weights(config, dtype) as (client, model):
    programs = build_decode_programs(
      LocalPrograms(model).build,
      DecodeConfig(temperature=0.0, prompt_lookup=False),
      sizes,
    )
    yield (
      client,
      programs,
      {
        "prompts": np.random.default_rng(0).integers(
          sizes.num_tokens, size=[task.batch_size, task.prompt_tokens]
        ),
        "lengths": [task.prompt_tokens] * task.batch_size,
        "keys": np.zeros([task.batch_size, 1, 2]),
      },
      sum(
        math.prod(part.panels.shape)
        for weight in model.weights.values()
        for part in weight.tensor_list
        if isinstance(part, PackedKernel)
      ),
    )


def choose_first_tokens(client, programs, inputs) -> None:
  """Reads the prompts and chooses the first new token of each."""
  client.call(programs.start, inputs)
  client.call(programs.advance, {"limit": 1})


def work(dtype: str, **task: object) -> None:
  """Takes turns: a continuation of all prompts each."""
  own_process()  # as commands do
  task = Task(**task)
  with decoding(task, dtype) as (client, programs, inputs, step_bytes):
    to_the_end = {"limit": task.sequence_length - task.prompt_tokens}

    def turn() -> dict[str, float]:
      choose_first_tokens(client, programs, inputs)
      start = time.perf_counter()
      client.call(programs.advance, to_the_end)
      secs = time.perf_counter() - start
      return {"secs": secs, "read_bytes": task.timed_steps * step_bytes}

    turn()  # compiles
    take_turns(turn, {"parameters": models.num_parameters(task.config(dtype))})


def _our_command(task: Task, dtype: str) -> list[str]:
  return worker_command("decode", dtype=dtype, **dataclasses.asdict(task))


def _write_gguf(task: Task, folder: str) -> str:
  """Writes a model for llama.cpp with random weights; returns its path."""
  import numpy as np

  from palm_mtf.export.gguf.files import write_gguf
  from palm_mtf.export.gguf.metadata import (
    find_gguf_architecture,
    make_model_metadata,
  )
  from palm_mtf.export.huggingface.weights import find_tensor_shapes

  config = task.config("float32")
  own = find_gguf_architecture(config)
  shapes = find_tensor_shapes(config, own.layout)
  rng = np.random.default_rng(0)
  path = os.path.join(folder, "model.gguf")
  write_gguf(
    path,
    {**make_model_metadata(config, own), "tokenizer.ggml.model": "no_vocab"},
    shapes,
    "float32",
    lambda name: 0.04 * rng.standard_normal(shapes[name], np.float32),
  )
  return path


def _bits(text: str) -> int | str:
  return text if text in OURS else int(text)


def _races(
  chosen: argparse.Namespace, task: Task, folder: str
) -> Iterator[dict[tuple[str, str], list[str]]]:
  """Yields the command lines of programs that take turns with one another."""
  if chosen.attention:
    yield {
      (x, "bfloat16"): _our_command(
        dataclasses.replace(task, attention=x), "bfloat16"
      )
      for x in ("multi_query", "multi_head")
    }
    return
  if chosen.experts:
    for bits in map(_bits, chosen.bits):
      yield {
        (x, OURS[bits]): _our_command(
          dataclasses.replace(task, block=x), OURS[bits]
        )
        for x in models.EXPERTS_AND_MLP
      }
    return
  gguf = _write_gguf(task, folder) if "llama_cpp" in chosen.peer else ""
  for bits in map(_bits, chosen.bits):
    commands = {("ours", OURS[bits]): _our_command(task, OURS[bits])}
    for name in chosen.peer:
      peer = peers.PEERS["decode"][name]
      if bits in peer.dtypes:
        commands[name, peer.dtypes[bits]] = peers.peer_command(
          chosen.peer_python,
          peer,
          {
            x: getattr(task.config("float32"), x)
            for x in models.SIZES[task.size]
          },
          prompt_tokens=task.prompt_tokens,
          batch_size=task.batch_size,
          dtype=peer.dtypes[bits],
          **({"model": gguf} if name == "llama_cpp" else {}),
        )
    yield commands


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields a record per program and number of bits."""
  peers.check_peers("decode", chosen.peer, chosen.peer_python)
  task = Task(
    chosen.size, chosen.sequence_length, chosen.batch_size, block=chosen.block
  )
  tolerance = _TOLERANCE if chosen.attention else 0.0
  if chosen.experts:
    tolerance = math.inf  # one model has several times as many parameters
  with tempfile.TemporaryDirectory() as folder:
    for commands in _races(chosen, task, folder):
      # The loop starts first, while there are free pages of 2 MiB.
      turns = pairs.race(
        {_MEMORY: peers.memory_command(), **commands},
        chosen.rounds,
        tolerance=tolerance,
      )
      memory = turns.pop(_MEMORY)
      for record, own in zip(
        pairs.speed_records(turns, task.timed_tokens),
        turns.values(),
        strict=True,
      ):
        record |= dataclasses.asdict(task)
        # A step reads the weights of the chosen experts only.
        if task.config("float32").mlp != "experts" and not chosen.experts:
          record |= memory_fields(task, own, memory)
        yield record


def memory_fields(
  task: Task, turns: Sequence[pairs.Turn], memory: Sequence[pairs.Turn]
) -> dict[str, float]:
  """Returns a step's bytes, their rate, and that rate divided by memory's."""
  own, loop = (
    [dataclasses.replace(x, secs=x.secs / x.values["read_bytes"]) for x in some]
    for some in (turns, memory)
  )
  rates = [1 / statistics.median(x.secs for x in some) for some in (own, loop)]
  return {
    "step_bytes": turns[0].values["read_bytes"] / task.timed_steps,
    "read_bytes_per_sec": rates[0],
    "memory_bytes_per_sec": rates[1],
    "memory_share": pairs.ratio(loop, own).median,
  }
