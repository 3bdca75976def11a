# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line of benches: gin flags, processes, records and errors."""

# It imports no other file of this folder, so that it can be imported by those
# that run as `python tools/x.py` and by those that run as `python -m tools.x`.

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from palm_mtf.cli import gin_files
from palm_mtf.config import Config, PalmConfig
from palm_mtf.errors import UserError
from palm_mtf.machine.activation_dtype import resolved


def one_line_errors(main: Callable[..., int | None]) -> Callable[..., int]:
  """Makes a UserError one line on stderr and exit code 2, as palm_mtf does."""
  # Not __module__, which is "__main__" for the tool that runs.
  name = Path(main.__code__.co_filename).stem

  @functools.wraps(main)
  def run(*arguments: Any) -> int:
    try:
      return main(*arguments) or 0
    except UserError as error:
      print(f"{name}: {error}", file=sys.stderr)
      return 2

  return run


def read_gin_arguments(
  parser: argparse.ArgumentParser, default: str
) -> tuple[argparse.Namespace, list[str]]:
  """Adds the flags of `palm_mtf train`; returns the choices and the macros.

  Args:
    parser: parser of the bench's own flags.
    default: gin file that --gin_file replaces.

  Raises:
    UserError: there is a flag that neither the bench nor gin has.
  """
  add = parser.add_argument
  add("--gin_file", action="append", help=f"by default {default}")
  add("--json", action="store_true", help="print one object a line")
  chosen, macros = parser.parse_known_args()
  for flag in macros:
    if not flag.startswith("--gin.") or "=" not in flag:
      raise UserError(f"{flag}: no such flag; macros are --gin.NAME=VALUE.")
  return chosen, [flag.removeprefix("--gin.") for flag in macros]


def gin_flags(files: Iterable[str] | None, macros: Iterable[str]) -> list[str]:
  """Returns the flags that give gin files and macros to another process."""
  return [
    *(f"--gin_file={file}" for file in files or []),
    *(f"--gin.{macro}" for macro in macros),
  ]


def train_config(files: Sequence[str], macros: Sequence[str]) -> Config:
  """Returns the settings of `palm_mtf train`, ACTIVATION_DTYPE resolved.

  Args:
    files: gin files.
    macros: "NAME=VALUE" texts over all files.

  Raises:
    UserError: something in them is wrong.
  """
  # A recipe leaves MODEL_DIR to the user; no bench writes there.
  macros = ["MODEL_DIR='none'", *macros]
  _, config = gin_files.load("train", files, macros).build()
  model = resolved(config.model, config.mesh_layout)
  return dataclasses.replace(config, model=model)


def random_tokens(model: PalmConfig, batch_size: int) -> np.ndarray:
  """Returns random ids, [batch_size, sequence_length], int64."""
  shape = [batch_size, model.sequence_length]
  return np.random.default_rng(0).integers(model.vocab_size, size=shape)


def seconds_of(function: Callable[..., object], *arguments: object) -> float:
  """Returns the wall-clock seconds of one call."""
  start = time.perf_counter()
  function(*arguments)
  return time.perf_counter() - start


def print_measured(
  script: str,
  cases: Iterable[tuple[dict[str, Any], Sequence[str]]],
  *,
  head: str,
  row: Callable[[dict], str],
  as_json: bool,
) -> int:
  """Measures every case in a process of its own; returns the exit code.

  Args:
    script: path of the bench, which with `flags` prints one JSON object.
    cases: pairs of the case's part of the record and the flags that measure it.
    head: first line of the table.
    row: function that makes a line of the table of a record.
    as_json: print records as JSON objects instead of a table.
  """
  # Lines are flushed: a bench takes minutes, and its stdout may be a file.
  if not as_json:
    print(head, flush=True)
  for case, flags in cases:
    # A new process sees neither memory nor threads nor compiled code of the
    # case before. Its stderr is ours: what fails has said why.
    done = subprocess.run(
      [sys.executable, script, *flags],
      stdout=subprocess.PIPE,
      check=False,
      text=True,
    )
    if done.returncode:
      return 1
    record = {**case, **json.loads(done.stdout)}
    print(json.dumps(record) if as_json else row(record), flush=True)
  return 0
