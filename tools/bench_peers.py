# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The 26.6M-parameter model of benches, and its peers in other frameworks."""

# The programs in tools/peers/ are the same model in PyTorch and JAX, and need a
# Python that has their framework. Programs take turns, ours first, for some
# rounds: whatever slows the machine down meets all of them. A ratio compares
# the two runs of one round, and the median over rounds is printed.

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from palm_mtf.config.model import PalmConfig
from palm_mtf.config.optimizer import AdafactorConfig
from palm_mtf.errors import UserError, check_choice, check_count

BATCH_SIZE = 8  # sequences of a training step, of one pod
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
_SIZES = {
  "num_layers": 6,
  "d_model": 512,
  "num_heads": 8,
  "d_kv": 64,
  "d_ff": 2048,
  "vocab_size": 8192,
  "sequence_length": 256,
}
_TIMEOUT_SECS = 1800

# Records of all rounds, by program and dtype.
Results = dict[tuple[str, str], list[dict]]


def benchmark_config(dtype: str) -> PalmConfig:
  """Returns the architecture that every program has."""
  return PalmConfig(activation_dtype=dtype, **_SIZES)


def read_arguments(
  parser: argparse.ArgumentParser, modules_of: Mapping[str, Sequence[str]]
) -> argparse.Namespace:
  """Adds the flags of a comparison; returns the choices, --peer as a list.

  Args:
    parser: parser of the bench's own flags.
    modules_of: modules that a peer imports, by its name.

  Raises:
    UserError: no such peer, or --peer_python lacks what it imports.
  """
  add = parser.add_argument
  add("--json", action="store_true", help="print one object a line")
  add("--rounds", type=int, default=3, help="runs of each program")
  add("--peer", default="", help=f"some of {','.join(modules_of)}")
  add("--peer_python", default=sys.executable, help="interpreter of the peers")
  arguments = parser.parse_args()
  check_count("--rounds", arguments.rounds)
  arguments.peer = [name for name in arguments.peer.split(",") if name]
  for name in arguments.peer:
    check_choice("--peer", name, modules_of)
    for module in modules_of[name]:
      _check_module(name, module, arguments.peer_python)
  return arguments


def _check_module(peer: str, module: str, python: str) -> None:
  look = f"import importlib.util as u; print(u.find_spec({module!r}))"
  try:
    found = subprocess.run(
      [python, "-c", look], capture_output=True, text=True, timeout=60
    ).stdout.strip()
  except (OSError, subprocess.TimeoutExpired) as error:
    raise UserError(
      f"--peer_python = {python!r}: cannot be run ({error}); give the "
      f"path of a Python that has {module}."
    ) from error
  if found in ("", "None"):
    raise UserError(
      f"--peer = {peer!r}: {python} has no module {module}; install "
      "it there, or name another Python with --peer_python."
    )


def peer_command(
  python: str, program: Sequence[str], config: PalmConfig, **settings: object
) -> list[str]:
  """Returns the command line of a peer, whose flags are named as our settings.

  Args:
    python: path of an interpreter that has the peer's framework.
    program: name of a file in tools/peers/, and flags of it alone.
    config: architecture.
    **settings: further flags.
  """
  name, *flags = program
  values = {x: getattr(config, x) for x in _SIZES}
  values |= {"dtype": config.activation_dtype, **settings}
  path = Path(__file__).resolve().parent / "peers" / name
  return [python, str(path), *flags, *(f"--{k}={v}" for k, v in values.items())]


def run_rounds(
  commands: Mapping[tuple[str, str], Sequence[str]], rounds: int
) -> Results:
  """Returns what every program printed, an object a round, taking turns."""
  results: Results = {key: [] for key in commands}
  for number in range(1, rounds + 1):
    for key, command in commands.items():
      name = " ".join(key)
      results[key].append(_run(name, command))
      speed = results[key][-1]["tokens_per_sec"]
      print(
        f"round {number}/{rounds}: {name} {speed:,.0f} tokens/s",
        file=sys.stderr,
        flush=True,
      )
  return results


def _run(name: str, command: Sequence[str]) -> dict:
  done = subprocess.run(
    command, capture_output=True, text=True, timeout=_TIMEOUT_SECS
  )
  if done.returncode:
    raise RuntimeError(f"{name} exited with {done.returncode}:\n{done.stderr}")
  result = json.loads(done.stdout.splitlines()[-1])
  # The cheapest proof that both have the same sizes.
  if result["parameters"] != NUM_PARAMETERS:
    raise RuntimeError(
      f"{name} has {result['parameters']:,} parameters, not "
      f"{NUM_PARAMETERS:,}: its speed cannot be compared."
    )
  return result


def speeds(runs: Sequence[dict]) -> list[float]:
  """Returns the tokens per second of each run."""
  return [run["tokens_per_sec"] for run in runs]


def _fastest(results: Results, program: str) -> tuple[str, list[dict]]:
  """Returns the dtype in which a program is the fastest, and its runs."""
  own = {
    dtype: runs for (name, dtype), runs in results.items() if name == program
  }
  dtype = max(own, key=lambda x: statistics.median(speeds(own[x])))
  return dtype, own[dtype]


def compare(results: Results, ours: str = "ours") -> list[dict]:
  """Returns one record a peer, or one of ours alone where there is no peer.

  Args:
    results: records of all rounds.
    ours: name of the program that is compared with all others.

  Example:
    Ours 6, 8, 9 and a peer's 3, 5, 3 tokens per second have the ratios 2, 1.6
    and 3, and so the ratio 2.
  """
  dtype, runs = _fastest(results, ours)
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
    peer_dtype, theirs = _fastest(results, peer)
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
