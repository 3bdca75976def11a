# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What the commands of several benches have in common.

Each thing is measured in a process of its own, so that none sees what another
left behind.
"""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from palm_mtf.cli import gin_files
from palm_mtf.config import Config
from palm_mtf.errors import UserError
from palm_mtf.machine.activation_dtype import resolved


def macros_of(flags: Sequence[str]) -> list[str]:
  """Returns "NAME=VALUE" for each "--gin.NAME=VALUE".

  Raises:
    UserError: there is another flag.
  """
  for flag in flags:
    if not flag.startswith("--gin.") or "=" not in flag:
      raise UserError(f"{flag}: no such flag; macros are --gin.NAME=VALUE.")
  return [flag.removeprefix("--gin.") for flag in flags]


def train_config(files: Sequence[str], macros: Sequence[str]) -> Config:
  """Returns the settings of `palm_mtf train`, ACTIVATION_DTYPE resolved.

  Args:
    files: gin files.
    macros: "NAME=VALUE" texts over all files.

  Raises:
    UserError: something in them is wrong.
  """
  _, config = gin_files.load("train", files, macros).build()
  model = resolved(config.model, config.mesh_layout)
  return dataclasses.replace(config, model=model)


def measured(script: str, *flags: str) -> dict[str, Any] | None:
  """Runs a script of this folder with flags that make it measure one thing.

  Returns:
    The JSON object that it prints; None where it fails, which it has said.
  """
  result = subprocess.run(
    [sys.executable, script, *flags],
    stdout=subprocess.PIPE,
    check=False,
    text=True,
  )
  return None if result.returncode else json.loads(result.stdout)
