# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The models of benches, and the command lines of their peers."""

# The programs in tools/peers/ are the same model in other frameworks, and need
# a Python that has their framework. It imports no other file of this folder, as
# bench_command.py.

import argparse
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from palm_mtf.accounting.architecture import count_norm_scales, count_parameters
from palm_mtf.config import AdafactorConfig, PalmConfig
from palm_mtf.errors import UserError, check_choice

BATCH_SIZE = 8  # sequences of a step of one pod
PALM_OPTIMIZER = AdafactorConfig(
  learning_rate=0.01,
  beta1=0.9,
  beta2_exponent=0.8,
  update_clip=1.0,
  gradient_clip=1.0,
  weight_decay_exponent=2.0,
  z_loss=1e-4,
)


def _size(layers: int, width: int, vocab: int) -> dict[str, int]:
  return {
    "num_layers": layers,
    "d_model": width,
    "num_heads": width // 64,
    "d_kv": 64,
    "d_ff": 4 * width,
    "vocab_size": vocab,
    "sequence_length": 256,
  }


SIZES = {
  "4.8M": _size(4, 256, 4096),
  "26.6M": _size(6, 512, 8192),
  "113M": _size(12, 768, 16384),
  "125M": _size(12, 768, 32000),
}


def benchmark_config(dtype: str, size: str = "26.6M") -> PalmConfig:
  """Returns the architecture that every program has, of one of SIZES."""
  return PalmConfig(activation_dtype=dtype, **SIZES[size])


def num_parameters(config: PalmConfig) -> int:
  """Returns the number of parameters, scales of norms included, as peers do."""
  return count_parameters(config) + count_norm_scales(config)


def read_arguments(
  parser: argparse.ArgumentParser, modules_of: Mapping[str, Sequence[str]]
) -> argparse.Namespace:
  """Adds the flags of a comparison; returns the choices, --peer as a list.

  Args:
    parser: parser of the bench's own flags.
    modules_of: modules that a peer imports, by its name.

  Raises:
    UserError: no such size or peer, or --peer_python lacks what it imports.
  """
  add = parser.add_argument
  add("--size", default="26.6M", help=f"one of {', '.join(SIZES)}")
  add("--json", action="store_true", help="print one object a line")
  add("--rounds", type=int, default=40, help="turns of each program")
  add("--peer", default="", help=f"some of {','.join(modules_of)}")
  add("--peer_python", default=sys.executable, help="interpreter of the peers")
  arguments = parser.parse_args()
  check_choice("--size", arguments.size, SIZES)
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
  python: str,
  program: Sequence[str],
  sizes: Mapping[str, object],
  **settings: object,
) -> list[str]:
  """Returns the command line of a peer, whose flags are named as our settings.

  Args:
    python: path of an interpreter that has the peer's framework.
    program: name of a file in tools/peers/, and flags of it alone.
    sizes: one of SIZES.
    **settings: further flags.
  """
  name, *flags = program
  path = Path(__file__).resolve().parent / "peers" / name
  values = {**sizes, **settings}
  return [python, str(path), *flags, *(f"--{k}={v}" for k, v in values.items())]


def table(rows: Iterable[Mapping[str, object]]) -> Iterable[str]:
  """Yields lines for a reader: speeds, peaks, and ratios ours / peer."""
  head = f"{'program':<14} {'dtype':<9} {'tokens/s':>9} {'peak, MB':>9}"
  yield f"{head}  ratio of ours to it"
  for row in rows:
    line = f"{row['program']:<14} {row['dtype']:<9} "
    line += f"{row['tokens_per_sec']:>9,.0f} {row['peak_bytes'] / 1e6:>9,.0f}"
    if "ratio" in row:
      line += f"  {row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f}, "
      line += f"{row['rounds']} rounds"
      line += ", disturbed)" if row["is_disturbed"] else ")"
    yield line
