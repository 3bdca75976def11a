# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the speed of training a 26.6M-parameter PaLM with other frameworks.

  python tools/bench_train.py
  python tools/bench_train.py --peer torch,jax --peer_python PATH --json

Every program trains the same model on one random batch in a process of its
own. The programs take turns, ours first, for --rounds rounds, so that whatever
slows the machine down meets all of them; a ratio compares the two runs of one
round, and the median over rounds is printed. The peers are in tools/peers/ and
need an interpreter that has their framework; each docstring there says what
its program is. Results are on stdout, progress is on stderr.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from palm_mtf.accounting.params import count_norm_scales, count_parameters
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import PalmConfig
from palm_mtf.config.optimizer import AdafactorConfig
from palm_mtf.errors import UserError, check_choice, check_count
from palm_mtf.machine.activation_dtype import fast_dtype_here

BATCH_SIZE = 8
WARM_UP_STEPS = 2  # not timed: the first compiles, the second fills caches
PROCESS_TIMEOUT_SECS = 1800
NUM_PARAMETERS = 26_611_200  # norm scales included

PALM_OPTIMIZER = AdafactorConfig(
  learning_rate=0.01,
  beta1=0.9,
  beta2_exponent=0.8,
  update_clip=1.0,
  gradient_clip=1.0,
  weight_decay_exponent=2.0,
  z_loss=1e-4,
)

# Each peer's program and flags, and the modules it imports.
PEERS = {
  "torch": (["torch_palm.py", "--compile"], ["torch"]),
  "torch_eager": (["torch_palm.py"], ["torch"]),
  "jax": (["jax_palm.py"], ["jax", "optax"]),
}


def benchmark_config(dtype: str) -> PalmConfig:
  """Returns the architecture that every program trains."""
  return PalmConfig(
    num_layers=6,
    d_model=512,
    num_heads=8,
    d_kv=64,
    d_ff=2048,
    vocab_size=8192,
    sequence_length=256,
    activation_dtype=dtype,
  )


def run_ours(config: PalmConfig, steps: int) -> float:
  """Trains `config` with palm_mtf on BATCH_SIZE sequences of random tokens.

  Returns:
    Tokens per second: those of one step over the median time of `steps` steps,
    after WARM_UP_STEPS that are not timed.
  """
  import numpy as np

  from palm_mtf._tf import tf
  from palm_mtf.mesh.session import session_config
  from palm_mtf.programs.train_program import build_train_program

  tokens = np.random.default_rng(0).integers(
    config.vocab_size, size=[BATCH_SIZE, config.sequence_length]
  )
  mesh = MeshLayout(mesh_shape="", layout="")
  with tf.Graph().as_default(), tf.Session(config=session_config(1)) as session:
    program = build_train_program(
      config, mesh, PALM_OPTIMIZER, batch_size=BATCH_SIZE, seed=0
    )
    session.run(program.initialize)
    run_step = session.make_callable(
      [program.metrics["loss"], program.update],
      [*program.pods[0].features.values(), program.step],
    )
    times = []
    for step in range(WARM_UP_STEPS + steps):
      start = time.perf_counter()
      run_step(tokens, tokens, step)
      times.append(time.perf_counter() - start)
  median = statistics.median(times[WARM_UP_STEPS:])
  return BATCH_SIZE * config.sequence_length / median


def peer_command(name: str, peer_python: str, config, steps: int) -> list[str]:
  """Returns the command line that trains `config` with peer `name`."""
  (program, *flags), _ = PEERS[name]
  path = Path(__file__).resolve().parent / "peers" / program
  sizes = dataclasses.asdict(config)
  dtype = sizes.pop("activation_dtype")
  # The peers are PaLM's own form and have no choice of it.
  for field in ("norm", "block", "attention", "remat"):
    del sizes[field]
  sizes.update(batch_size=BATCH_SIZE, steps=steps, dtype=dtype)
  settings = [f"--{field}={value}" for field, value in sizes.items()]
  return [peer_python, str(path), *flags, *settings]


def our_command(dtype: str, steps: int) -> list[str]:
  """Returns the command line that trains with palm_mtf."""
  worker = ["--worker=ours", f"--dtype={dtype}", f"--steps={steps}"]
  return [sys.executable, str(Path(__file__).resolve()), *worker]


def check_peers(modules_of: dict[str, list[str]], peer_python: str) -> None:
  """Raises UserError unless `peer_python` can import what the peers need."""
  for name, modules in modules_of.items():
    for module in modules:
      look = f"import importlib.util as u; print(u.find_spec({module!r}))"
      try:
        found = subprocess.run(
          [peer_python, "-c", look], capture_output=True, text=True, timeout=60
        ).stdout.strip()
      except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(
          f"--peer_python = {peer_python!r}: cannot be run ({error}); give the "
          f"path of a Python that has {module}."
        ) from error
      if found in ("", "None"):
        raise UserError(
          f"--peer = {name!r}: {peer_python} has no module {module}; install "
          "it there, or name another Python with --peer_python."
        )


def run_program(name: str, command: list[str]) -> float:
  """Runs one program and returns its tokens per second."""
  done = subprocess.run(
    command, capture_output=True, text=True, timeout=PROCESS_TIMEOUT_SECS
  )
  if done.returncode:
    raise RuntimeError(f"{name} exited with {done.returncode}:\n{done.stderr}")
  result = json.loads(done.stdout.splitlines()[-1])
  parameters = result.get("parameters", NUM_PARAMETERS)
  if parameters != NUM_PARAMETERS:
    raise RuntimeError(
      f"{name} trains {parameters:,} parameters, not {NUM_PARAMETERS:,}: its "
      "speed cannot be compared."
    )
  return result["tokens_per_sec"]


def run_rounds(commands: dict[str, list[str]], rounds: int):
  """Returns tokens per second by program, one number a round, in turns."""
  speeds = {name: [] for name in commands}
  for number in range(1, rounds + 1):
    for name, command in commands.items():
      speeds[name].append(run_program(name, command))
      print(
        f"round {number}/{rounds}: {name} {speeds[name][-1]:,.0f} tokens/s",
        file=sys.stderr,
        flush=True,
      )
  return speeds


def compare(speeds: dict[str, list[float]]) -> list[dict]:
  """Returns one record a peer, or one of ours alone where there is no peer.

  Example:
    {"ours": [6, 8, 9], "torch": [3, 5, 3]} has the ratios 2, 1.6 and 3 and
    gives tokens_per_sec 8, peer_tokens_per_sec 3 and ratio 2.
  """
  ours = {"tokens_per_sec": round(statistics.median(speeds["ours"]), 1)}
  records = []
  for name, theirs in speeds.items():
    if name == "ours":
      continue
    ratios = [a / b for a, b in zip(speeds["ours"], theirs, strict=True)]
    records.append(
      {
        "peer": name,
        **ours,
        "peer_tokens_per_sec": round(statistics.median(theirs), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
      }
    )
  return records or [ours]


def print_table(records: list[dict]) -> None:
  """Prints the records for a reader; ratio is ours / peer."""
  print(f"{'program':<12} {'tokens/s':>9} {'ratio':>6}  lowest to highest")
  print(f"{'palm_mtf':<12} {records[0]['tokens_per_sec']:>9,.0f}")
  for record in records:
    if "peer" in record:
      print(
        f"{record['peer']:<12} {record['peer_tokens_per_sec']:>9,.0f} "
        f"{record['ratio']:>6.2f}  "
        f"{record['ratio_min']:.2f} to {record['ratio_max']:.2f}"
      )


def read_arguments() -> argparse.Namespace:
  """Returns the command line's choices, peers as a list; checks all of them."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--json", action="store_true", help="print one object a line")
  add("--steps", type=int, default=10, help="timed steps of one run")
  add("--rounds", type=int, default=3, help="runs of each program")
  add(
    "--dtype",
    default=fast_dtype_here(),
    help="of all programs, bfloat16 or float32; what this machine multiplies "
    "fast",
  )
  add("--peer", default="", help=f"some of {','.join(PEERS)}")
  add("--peer_python", default=sys.executable, help="interpreter of the peers")
  add("--worker", choices=["ours"], help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  check_count("--steps", arguments.steps)
  check_count("--rounds", arguments.rounds)
  check_choice("--dtype", arguments.dtype, ["bfloat16", "float32"])
  arguments.peer = [name for name in arguments.peer.split(",") if name]
  for name in arguments.peer:
    check_choice("--peer", name, PEERS)
  modules_of = {name: PEERS[name][1] for name in arguments.peer}
  check_peers(modules_of, arguments.peer_python)
  return arguments


def main() -> None:
  """Compares, or as a worker of a comparison runs ours and prints its speed."""
  try:
    arguments = read_arguments()
  except UserError as error:
    print(f"bench_train: {error}", file=sys.stderr)
    raise SystemExit(2) from None
  config, steps = benchmark_config(arguments.dtype), arguments.steps
  if arguments.worker:
    speed = run_ours(config, steps)
    parameters = count_parameters(config) + count_norm_scales(config)
    print(
      json.dumps({"tokens_per_sec": round(speed, 1), "parameters": parameters})
    )
    return
  commands = {"ours": our_command(arguments.dtype, steps)}
  for name in arguments.peer:
    python = arguments.peer_python
    commands[name] = peer_command(name, python, config, steps)
  records = compare(run_rounds(commands, arguments.rounds))
  if arguments.json:
    settings = {
      "dtype": arguments.dtype,
      "steps": steps,
      "rounds": arguments.rounds,
    }
    for record in records:
      print(json.dumps({**record, **settings}))
  else:
    print_table(records)


if __name__ == "__main__":
  main()
