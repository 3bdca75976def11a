# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings that tests of several folders use; imports without TensorFlow."""

import dataclasses

from palm_mtf.accounting.work import Work
from palm_mtf.cli.gin_files import read_chip
from palm_mtf.config import (
  AdafactorConfig,
  AdamwConfig,
  HardwareConfig,
  LossConfig,
  MeshLayout,
  ModelConfig,
  MuonConfig,
  OptimizerConfig,
  PodsConfig,
  StepConfig,
)

PALM_OPTIMIZER = AdafactorConfig(
  learning_rate=0.01,
  beta1=0.9,
  beta2_exponent=0.8,
  update_clip=1.0,
  gradient_clip=1.0,
  weight_decay_exponent=2.0,
)
ADAMW = AdamwConfig(
  learning_rate=1e-2,
  learning_rate_schedule="constant",
  beta1=0.9,
  beta2=0.95,
  gradient_clip=1.0,
  weight_decay=0.1,
  weight_decay_on="kernels",
)
MUON = MuonConfig(**{**dataclasses.asdict(ADAMW), "optimizer": "muon"})
PALM_LOSS = LossConfig(z_loss=1e-4)
# Of a model function, which has its own loss.
FOREIGN_OPTIMIZER = dataclasses.replace(
  PALM_OPTIMIZER, learning_rate=0.1, weight_decay_exponent=None
)


def step_config(
  model: ModelConfig,
  mesh_layout: MeshLayout = MeshLayout(mesh_shape="", layout=""),  # noqa: B008
  optimizer: OptimizerConfig = PALM_OPTIMIZER,
  *,
  loss: LossConfig = PALM_LOSS,
  pods: PodsConfig = PodsConfig(),  # noqa: B008
) -> StepConfig:
  """Returns settings of a training step, with PaLM's optimizer and loss."""
  return StepConfig(
    model=model,
    mesh_layout=mesh_layout,
    optimizer=optimizer,
    loss=loss,
    pods=pods,
  )


def work(
  model: ModelConfig,
  mesh: MeshLayout = MeshLayout(mesh_shape="", layout=""),  # noqa: B008
  rows: int = 1,
  *,
  optimizer: OptimizerConfig = PALM_OPTIMIZER,
  pods: PodsConfig = PodsConfig(),  # noqa: B008
  frozen: tuple[str, ...] = (),
) -> Work:
  """Returns the work of a step, with PaLM's optimizer."""
  return Work(
    model=model,
    mesh=mesh,
    optimizer=optimizer,
    pods=pods,
    rows=rows,
    frozen=frozen,
  )


def hardware_of(chip: str) -> HardwareConfig:
  """Returns a chip's rates, such as FLOP/s, from the chip's gin file."""
  settings = read_chip(chip).values()
  return HardwareConfig(**{x.name.lower(): x.value for x in settings})
