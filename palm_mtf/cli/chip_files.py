# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Gin files of chips: gin/hardware/<CHIP>.gin, and this machine's own."""

import re

from palm_mtf.cli.gin_folder import gin_folder
from palm_mtf.cli.gin_statements import Setting, read_file, read_statements
from palm_mtf.config import HardwareConfig
from palm_mtf.errors import UserError
from palm_mtf.machine.cache_folder import (
  measured_hardware,
  read_cached,
  warn_once,
)


def chip_settings(chip: object) -> dict[str, Setting]:
  """Returns the settings of a CHIP's file by macro, {} without a file."""
  if chip == "measured":
    return _measured_settings()
  path = gin_folder() / "hardware" / f"{chip}.gin"
  # Not a path, and whatever a gin file may hold.
  is_name = isinstance(chip, str) and re.fullmatch(r"\w{1,50}", chip)
  if not is_name or not path.is_file():
    return {}
  return {x.name: x for x in read_file(path) if isinstance(x, Setting)}


def _measured_settings() -> dict[str, Setting]:
  path = measured_hardware()
  content = read_cached(path)
  if content is None:
    return {}
  try:
    statements = read_statements(content.decode(), path)
  except (UserError, UnicodeDecodeError) as error:
    warn_once(
      f"{path} does not hold measured rates ({error}); measure them again: "
      "palm_mtf plan --calibrate"
    )
    return {}
  return {x.name: x for x in statements if isinstance(x, Setting)}


def hardware_of(chip: str) -> HardwareConfig:
  """Returns the rates of a chip of gin/hardware."""
  settings = chip_settings(chip).values()
  return HardwareConfig(**{x.name.lower(): x.value for x in settings})
