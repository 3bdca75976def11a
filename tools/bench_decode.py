# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the speed of decoding a 26.6M-parameter PaLM with other frameworks.

  python tools/bench_decode.py
  python tools/bench_decode.py --batch_size 16 --peer torch,jax --peer_python P
  python tools/bench_decode.py --attention --sequence_length 4096

Every program decodes the same model greedily behind a prompt of a quarter of
the sequence, in a process of its own and in each dtype that it has; the fastest
counts. The programs take turns, so that whatever slows the machine down meets
all of them; a ratio compares the two runs of one round, and the median over
rounds is printed. Ours also measures the machine's memory bandwidth, and says
what share it reached of the speed at which every weight could be read once a
token. `--attention` compares multi-query with multi-head attention instead,
both ours. Peers are in tools/peers/ and need an interpreter with their
framework. Results are on stdout, progress is on stderr.
"""

import argparse
import dataclasses
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from concurrent import futures
from pathlib import Path

from palm_mtf.accounting.decode import decode_weight_bytes
from palm_mtf.config.decode import DecodeConfig
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import PalmConfig
from palm_mtf.errors import UserError, check_choice, check_count
from palm_mtf.machine.activation_dtype import fast_dtype_here

# Beside this file; nothing else puts the folder on the path under pytest.
sys.path.append(str(Path(__file__).resolve().parent))
from bench_train import (
  NUM_PARAMETERS,
  PROCESS_TIMEOUT_SECS,
  benchmark_config,
  check_peers,
)

# Each peer's program and dtypes, and the modules that it imports.
PEERS = {
  "torch": ("torch_decode.py", ["bfloat16", "float32"], ["torch"]),
  "jax": ("jax_decode.py", ["float32", "bfloat16"], ["jax", "optax"]),
}
OURS = ["int8", "bfloat16", "float32"]


@dataclasses.dataclass(frozen=True)
class Task:
  """What is decoded.

  Attributes:
    sequence_length: of prompt and continuation.
    batch_size: prompts.
    repeats: timed runs in one process.
    attention: of PalmConfig.
  """

  sequence_length: int
  batch_size: int
  repeats: int
  attention: str = "multi_query"

  @property
  def prompt_tokens(self) -> int:
    """A quarter of the sequence."""
    return self.sequence_length // 4

  def config(self, dtype: str) -> PalmConfig:
    """Returns the architecture; activations of int8 weights are bfloat16."""
    activations = fast_dtype_here() if dtype == "int8" else dtype
    return dataclasses.replace(
      benchmark_config(activations),
      sequence_length=self.sequence_length,
      attention=self.attention,
    )


def measure_bandwidth() -> float:
  """Returns the bytes per second at which a product reads float32 weights."""
  from palm_mtf._tf import tf
  from palm_mtf.mesh.session import session_config

  shape = [4096, 16384]  # 256 MiB: no cache holds it
  with tf.Graph().as_default(), tf.Session(config=session_config(1)) as session:
    w = tf.Variable(tf.zeros(shape), use_resource=True)
    session.run(w.initializer)
    run = session.make_callable(tf.matmul(tf.ones([1, shape[0]]), w))
    seconds = []
    for _ in range(12):
      start = time.perf_counter()
      run()
      seconds.append(time.perf_counter() - start)
  return 4 * shape[0] * shape[1] / min(seconds)


def run_ours(task: Task, dtype: str) -> dict:
  """Decodes random weights with palm_mtf.

  Returns:
    tokens_per_sec, of the tokens behind the first; and bandwidth_share.
  """
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
  # The last id is behind all that can be chosen: nothing ends early.
  sizes = PromptBatch(
    num_prompts=task.batch_size,
    prompt_tokens=task.prompt_tokens,
    max_tokens=max_tokens,
    num_tokens=config.vocab_size - 1,
    eod_id=config.vocab_size - 1,
  )
  weight_dtype = "int8" if dtype == "int8" else "activation"
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
    session.run(model.prepare)
    feed = {
      program.prompts: np.random.default_rng(0).integers(
        sizes.num_tokens, size=[task.batch_size, task.prompt_tokens]
      ),
      program.lengths: [task.prompt_tokens] * task.batch_size,
      program.keys: np.zeros([task.batch_size, 1, 2]),
    }
    seconds = []
    for _ in range(1 + task.repeats):
      session.run(program.start, feed)
      start = time.perf_counter()
      session.run(program.advance, {program.limit: max_tokens})
      seconds.append(time.perf_counter() - start)
  steps_per_sec = (max_tokens - 1) / statistics.median(seconds[1:])
  # In a process of its own: this one has the threads of its first session.
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
  return [sys.executable, str(Path(__file__).resolve()), *flags]


def peer_command(name: str, python: str, task: Task, dtype: str) -> list[str]:
  """Returns the command line that decodes with a peer."""
  path = Path(__file__).resolve().parent / "peers" / PEERS[name][0]
  values = dataclasses.asdict(task)
  del values["attention"]
  values.update(prompt_tokens=task.prompt_tokens, dtype=dtype)
  return [python, str(path), *(f"--{k}={v}" for k, v in values.items())]


def run_program(name: str, command: list[str], task: Task) -> dict:
  """Runs one program and returns what it printed."""
  done = subprocess.run(
    command, capture_output=True, text=True, timeout=PROCESS_TIMEOUT_SECS
  )
  if done.returncode:
    raise RuntimeError(f"{name} exited with {done.returncode}:\n{done.stderr}")
  result = json.loads(done.stdout.splitlines()[-1])
  if result["parameters"] != NUM_PARAMETERS:
    raise RuntimeError(
      f"{name} has {result['parameters']:,} parameters, not "
      f"{NUM_PARAMETERS:,}: its speed cannot be compared."
    )
  return result


def run_rounds(
  commands: dict[tuple[str, str], list[str]], rounds: int, task: Task
) -> dict[tuple[str, str], list[dict]]:
  """Returns what every program printed by (program, dtype), in turns."""
  results = {key: [] for key in commands}
  for number in range(1, rounds + 1):
    for key, command in commands.items():
      results[key].append(run_program(" ".join(key), command, task))
      print(
        f"round {number}/{rounds}: {' '.join(key)} "
        f"{results[key][-1]['tokens_per_sec']:,.0f} tokens/s",
        file=sys.stderr,
        flush=True,
      )
  return results


def fastest(
  results: dict[tuple[str, str], list[dict]], program: str
) -> tuple[str, list[dict]]:
  """Returns the dtype in which a program's median speed is the greatest."""
  of = {
    dtype: each for (name, dtype), each in results.items() if name == program
  }
  dtype = max(of, key=lambda x: statistics.median(speeds(of[x])))
  return dtype, of[dtype]


def speeds(runs: list[dict]) -> list[float]:
  """Returns tokens per second of each run."""
  return [run["tokens_per_sec"] for run in runs]


def compare(
  results: dict[tuple[str, str], list[dict]], ours: str = "ours"
) -> list[dict]:
  """Returns one record a peer, or one of ours alone where there is no peer.

  Args:
    results: of `run_rounds`.
    ours: the program that is compared with all others.
  """
  dtype, runs = fastest(results, ours)
  record = {
    "program": ours,
    "dtype": dtype,
    "tokens_per_sec": statistics.median(speeds(runs)),
  }
  for name in ("bandwidth_gb_per_sec", "bandwidth_share"):
    if name in runs[0]:
      record[name] = statistics.median(run[name] for run in runs)
  records = []
  for peer in dict.fromkeys(name for name, _ in results if name != ours):
    peer_dtype, theirs = fastest(results, peer)
    pairs = zip(speeds(runs), speeds(theirs), strict=True)
    ratios = [a / b for a, b in pairs]
    records.append(
      {
        **record,
        "peer": peer,
        "peer_dtype": peer_dtype,
        "peer_tokens_per_sec": statistics.median(speeds(theirs)),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
      }
    )
  return records or [record]


def print_table(
  records: list[dict], results: dict[tuple[str, str], list[dict]]
) -> None:
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


def read_arguments() -> argparse.Namespace:
  """Returns the command line's choices, peers as a list; checks all of them."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--json", action="store_true", help="print one object a line")
  add("--batch_size", type=int, default=1, help="prompts at once")
  add("--sequence_length", type=int, default=256, help="a quarter is prompt")
  add("--repeats", type=int, default=3, help="timed runs in one process")
  add("--rounds", type=int, default=3, help="runs of each program")
  add("--dtype", default="", help=f"some of {','.join(OURS)}, ours; all")
  add("--peer", default="", help=f"some of {','.join(PEERS)}")
  add("--peer_python", default=sys.executable, help="interpreter of the peers")
  add("--attention", action="store_true", help="compare both attentions")
  add("--worker", choices=OURS, help=argparse.SUPPRESS)
  add("--worker_attention", default="multi_query", help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  for name in ("batch_size", "repeats", "rounds"):
    check_count(f"--{name}", getattr(arguments, name))
  check_count("--sequence_length", arguments.sequence_length, minimum=8)
  arguments.dtype = [x for x in arguments.dtype.split(",") if x] or OURS
  for dtype in arguments.dtype:
    check_choice("--dtype", dtype, OURS)
  arguments.peer = [name for name in arguments.peer.split(",") if name]
  for name in arguments.peer:
    check_choice("--peer", name, PEERS)
  modules = {name: PEERS[name][2] for name in arguments.peer}
  check_peers(modules, arguments.peer_python)
  return arguments


def commands_of(
  arguments: argparse.Namespace, task: Task
) -> dict[tuple[str, str], list[str]]:
  """Returns the command line of every program and dtype."""
  if arguments.attention:
    return {
      (attention, "bfloat16"): our_command(
        dataclasses.replace(task, attention=attention), "bfloat16"
      )
      for attention in ("multi_query", "multi_head")
    }
  commands = {("ours", x): our_command(task, x) for x in arguments.dtype}
  for name in arguments.peer:
    for dtype in PEERS[name][1]:
      commands[name, dtype] = peer_command(
        name, arguments.peer_python, task, dtype
      )
  return commands


def main() -> None:
  """Compares, or as a worker of a comparison runs ours and prints its speed."""
  try:
    arguments = read_arguments()
  except UserError as error:
    print(f"bench_decode: {error}", file=sys.stderr)
    raise SystemExit(2) from None
  task = Task(
    sequence_length=arguments.sequence_length,
    batch_size=arguments.batch_size,
    repeats=arguments.repeats,
    attention=arguments.worker_attention,
  )
  if arguments.worker:
    print(json.dumps(run_ours(task, arguments.worker)))
    return
  commands = commands_of(arguments, task)
  results = run_rounds(commands, arguments.rounds, task)
  records = compare(results, next(iter(commands))[0])
  if arguments.json:
    settings = {
      name: getattr(arguments, name)
      for name in ("batch_size", "sequence_length", "repeats", "rounds")
    }
    for record in records:
      print(json.dumps({**record, **settings}))
  else:
    print_table(records, results)


if __name__ == "__main__":
  main()
