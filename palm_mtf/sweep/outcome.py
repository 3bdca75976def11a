# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""How a run of a sweep ended, as its folder keeps it."""

from palm_mtf.model_dir.atomic_files import write_atomically
from palm_mtf.model_dir.layout import SweepDir

FINISHED, STOPPED_EARLY = "finished", "stopped early"


def read_outcome(where: SweepDir, name: str) -> str | None:
  """Returns how a run ended, None for one that has to go on."""
  try:
    with open(where.outcome(name), encoding="utf-8", errors="replace") as file:
      outcome = file.read().strip()
  except FileNotFoundError:
    return None
  return outcome if outcome in (FINISHED, STOPPED_EARLY) else None


def write_outcome(where: SweepDir, name: str, outcome: str) -> None:
  """Keeps how a run ended; it is not repeated."""
  write_atomically(where.outcome(name), f"{outcome}\n".encode())
