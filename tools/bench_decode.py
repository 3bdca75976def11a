# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the speed of decoding a 26.6M-parameter PaLM with other frameworks.

  python tools/bench_decode.py
  python tools/bench_decode.py --batch_size 16 --peer torch,jax --peer_python P
  python tools/bench_decode.py --attention --sequence_length 4096

Results are on stdout, progress is on stderr.
"""

# Every program decodes the model of bench_peers.py greedily behind a prompt of
# a quarter of the sequence, in a process of its own and in each dtype that it
# has; the fastest dtype counts. Ours also measures the machine's memory
# bandwidth: at batch 1 a token takes at least the time of reading every weight
# once, and `bandwidth_share` is the share of that speed that was reached.
# `--attention` compares multi-query with multi-head attention, both ours.

import argparse
import dataclasses
import json
import multiprocessing
import statistics
import sys
from concurrent import futures

from bench_command import one_line_errors, seconds_of
from bench_peers import (
  NUM_PARAMETERS,
  Results,
  benchmark_config,
  compare,
  peer_command,
  read_arguments,
  run_rounds,
  speeds,
)

from palm_mtf.accounting.decode import decode_weight_bytes
from palm_mtf.config.decode import DecodeConfig
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import PalmConfig
from palm_mtf.errors import check_choice, check_count
from palm_mtf.machine.activation_dtype import fast_dtype_here

# Each peer's program and dtypes, and the modules that it imports.
PEERS = {
  "torch": ("torch_decode.py", ["bfloat16", "float32"], ["torch"]),
  "jax": ("jax_decode.py", ["float32", "bfloat16"], ["jax", "optax"]),
}
OURS = ["int8", "bfloat16", "float32"]
QUANTIZED = ["int8", "int4"]


@dataclasses.dataclass(frozen=True)
class Task:
  """Sizes of what is decoded.

  Attributes:
    sequence_length: tokens of prompt and continuation.
    batch_size: number of prompts.
    repeats: timed runs in one process.
    attention: "multi_query" or "multi_head".
  """

  sequence_length: int
  batch_size: int
  repeats: int
  attention: str = "multi_query"

  @property
  def prompt_tokens(self) -> int:
    """Tokens of a prompt: a quarter of the sequence."""
    return self.sequence_length // 4

  def config(self, dtype: str) -> PalmConfig:
    """Returns the architecture; quantized weights have the fast activations."""
    activations = fast_dtype_here() if dtype in QUANTIZED else dtype
    return dataclasses.replace(
      benchmark_config(activations),
      sequence_length=self.sequence_length,
      attention=self.attention,
    )


def measure_bandwidth() -> float:
  """Returns the rate at which a product reads float32 weights, bytes/s."""
  from palm_mtf._tf import tf
  from palm_mtf.mesh.session import session_config

  shape = [4096, 16384]  # 256 MiB: no cache holds it
  with tf.Graph().as_default(), tf.Session(config=session_config(1)) as session:
    w = tf.Variable(tf.zeros(shape), use_resource=True)
    session.run(w.initializer)
    run = session.make_callable(tf.matmul(tf.ones([1, shape[0]]), w))
    seconds = [seconds_of(run) for _ in range(12)]
  return 4 * shape[0] * shape[1] / min(seconds)


def run_ours(task: Task, dtype: str) -> dict:
  """Decodes with random weights; returns the speed, with bandwidth_share."""
  import numpy as np

  from palm_mtf._tf import tf
  from palm_mtf.decode.strategies import PromptBatch
  from palm_mtf.inference.decoder_session import step_session_config
  from palm_mtf.programs.generate_program import (
    build_decode_model,
    build_decode_program,
  )

  config = task.config(dtype)
  mesh = MeshLayout(mesh_shape="", layout="")
  max_tokens = task.sequence_length - task.prompt_tokens
  # [eod] is an id that is never chosen: no row ends early.
  sizes = PromptBatch(
    num_prompts=task.batch_size,
    prompt_tokens=task.prompt_tokens,
    max_tokens=max_tokens,
    num_tokens=config.vocab_size - 1,
    eod_id=config.vocab_size - 1,
  )
  weight_dtype = dtype if dtype in QUANTIZED else "activation"
  settings = DecodeConfig(temperature=0.0)
  session_config = step_session_config(config, mesh, weight_dtype)
  with tf.Graph().as_default(), tf.Session(config=session_config) as session:
    model = build_decode_model(config, mesh, weight_dtype)
    program = build_decode_program(model, settings, sizes)
    session.run(
      [
        part.variable.assign(0.04 * tf.random.normal(part.variable.shape))
        for parts in model.slices.values()
        for part in parts
      ]
    )
    session.run(model.prepare)  # casts, or rounds to int8, once
    feed = {
      program.prompts: np.random.default_rng(0).integers(
        sizes.num_tokens, size=[task.batch_size, task.prompt_tokens]
      ),
      program.lengths: [task.prompt_tokens] * task.batch_size,
      program.keys: np.zeros([task.batch_size, 1, 2]),
    }
    seconds = []
    for _ in range(1 + task.repeats):
      session.run(program.start, feed)  # reads the prompt, makes one token
      limit = {program.limit: max_tokens}
      seconds.append(seconds_of(session.run, program.advance, limit))
  # The first run compiles.
  steps_per_sec = (max_tokens - 1) / statistics.median(seconds[1:])
  # Decoding may use few threads, and a process keeps those of its first
  # session: bandwidth is measured in another process, with all of them.
  spawned = multiprocessing.get_context("spawn")
  with futures.ProcessPoolExecutor(1, mp_context=spawned) as pool:
    bandwidth = pool.submit(measure_bandwidth).result()
  share = steps_per_sec * decode_weight_bytes(config, weight_dtype) / bandwidth
  return {
    "tokens_per_sec": round(task.batch_size * steps_per_sec, 1),
    "parameters": NUM_PARAMETERS,
    "bandwidth_gb_per_sec": round(bandwidth / 1e9, 1),
    "bandwidth_share": round(share, 3),
  }


def our_command(task: Task, dtype: str) -> list[str]:
  """Returns the command line that decodes with palm_mtf."""
  values = {"worker": dtype, **dataclasses.asdict(task)}
  values["worker_attention"] = values.pop("attention")
  flags = [f"--{name}={value}" for name, value in values.items()]
  return [sys.executable, __file__, *flags]


def print_table(records: list[dict], results: Results) -> None:
  """Prints the records for a reader; ratio is ours / peer."""
  print(f"{'program':<12} {'dtype':<9} {'tokens/s':>9}")
  for (name, dtype), runs in results.items():
    print(f"{name:<12} {dtype:<9} {statistics.median(speeds(runs)):>9,.0f}")
  first = records[0]
  if "bandwidth_share" in first:
    print(
      f"{first['program']} in {first['dtype']} reaches "
      f"{first['bandwidth_share']:.0%} of the speed at which "
      f"{first['bandwidth_gb_per_sec']:.1f} GB/s read every weight once a token"
    )
  for record in records:
    if "peer" in record:
      print(
        f"ratio to {record['peer']} ({record['peer_dtype']}) "
        f"{record['ratio']:.2f}, {record['ratio_min']:.2f} to "
        f"{record['ratio_max']:.2f}"
      )


def commands_of(
  arguments: argparse.Namespace, task: Task
) -> dict[tuple[str, str], list[str]]:
  """Returns the command line of every program and dtype."""
  # The two attentions stand for two programs: the second is "the peer".
  if arguments.attention:
    return {
      (attention, "bfloat16"): our_command(
        dataclasses.replace(task, attention=attention), "bfloat16"
      )
      for attention in ("multi_query", "multi_head")
    }
  commands = {("ours", x): our_command(task, x) for x in arguments.dtype}
  for name in arguments.peer:
    program, dtypes, _ = PEERS[name]
    for dtype in dtypes:
      commands[name, dtype] = peer_command(
        arguments.peer_python,
        [program],
        task.config(dtype),
        prompt_tokens=task.prompt_tokens,
        batch_size=task.batch_size,
        repeats=task.repeats,
      )
  return commands


@one_line_errors
def main() -> None:
  """Compares, or as a worker of a comparison runs ours and prints its speed."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--batch_size", type=int, default=1, help="prompts at once")
  add("--sequence_length", type=int, default=256, help="a quarter is prompt")
  add("--repeats", type=int, default=3, help="timed runs in one process")
  add(
    "--dtype",
    default="",
    help=f"some of {','.join(OURS)}, int4, ours; all but int4",
  )
  add("--attention", action="store_true", help="compare both attentions")
  add("--worker", choices=[*OURS, "int4"], help=argparse.SUPPRESS)
  add("--worker_attention", default="multi_query", help=argparse.SUPPRESS)
  modules_of = {name: modules for name, (_, _, modules) in PEERS.items()}
  arguments = read_arguments(parser, modules_of)
  sizes = {x: getattr(arguments, x) for x in ("batch_size", "repeats")}
  for name, value in sizes.items():
    check_count(f"--{name}", value)
  check_count("--sequence_length", arguments.sequence_length, minimum=8)
  sizes["sequence_length"] = arguments.sequence_length
  arguments.dtype = [x for x in arguments.dtype.split(",") if x] or OURS
  for dtype in arguments.dtype:
    check_choice("--dtype", dtype, [*OURS, "int4"])
  task = Task(**sizes, attention=arguments.worker_attention)
  if arguments.worker:
    print(json.dumps(run_ours(task, arguments.worker)))
    return
  commands = commands_of(arguments, task)
  results = run_rounds(commands, arguments.rounds)
  records = compare(results, next(iter(commands))[0])
  if not arguments.json:
    print_table(records, results)
    return
  for record in records:
    print(json.dumps({**record, **sizes, "rounds": arguments.rounds}))


if __name__ == "__main__":
  sys.exit(main())
