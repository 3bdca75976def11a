# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Losses of runs that follow a known scaling law, and a run in a folder."""

import dataclasses
from pathlib import Path

import numpy as np

from palm_mtf.config import ModelConfig
from palm_mtf.sweep.runs import SweepRun
from palm_mtf.sweep.scaling_law import Law
from tests.config.checked_test import PALM

# Hoffmann et al. 2022, equation 10 of their appendix D.3.
CHINCHILLA = Law(1.69, 406.4, 0.34, 410.7, 0.28)


def chinchilla_loss(parameters, tokens):
  """The published law, written out."""
  return 1.69 + 406.4 / parameters**0.34 + 410.7 / tokens**0.28


def runs(noise: float = 0.0, seed: int = 0):
  """Returns parameters, tokens and losses, [20] each, of five sizes.

  Args:
    noise: standard deviation of log L.
    seed: seed of the noise.
  """
  sizes, tokens = np.meshgrid(
    np.geomspace(5e7, 5e9, 5), np.geomspace(1e9, 1e11, 4)
  )
  parameters, tokens = sizes.ravel(), tokens.ravel()
  drawn = np.random.default_rng(seed).normal(0, noise, len(tokens))
  return parameters, tokens, chinchilla_loss(parameters, tokens) * np.exp(drawn)


@dataclasses.dataclass(frozen=True)
class _RunSettings:
  """The part of a run's settings that its FLOPs depend on."""

  frozen: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Settings:
  """The settings of a run that its curve depends on."""

  model: ModelConfig = PALM
  run: _RunSettings = _RunSettings()


def sweep_run(folder: Path, is_held_out: bool = False) -> SweepRun:
  """Returns the run that has its metrics in a folder."""
  return SweepRun(
    name=folder.name,
    model_dir=str(folder),
    config=_Settings(),
    gin_text="",
    is_held_out=is_held_out,
  )


def row(name, parameters, tokens, loss, **columns):
  """Returns a row of the table of a sweep."""
  return {
    "run": name,
    "parameters": parameters,
    "tokens": tokens,
    "flops": 6 * parameters * tokens,
    "flops_per_token": 6 * parameters,
    "loss": loss,
    "outcome": "finished",
    "held_out": False,
    **columns,
  }
