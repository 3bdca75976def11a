# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""All settings of a run in one object."""

import dataclasses

from palm_mtf.config.data import DataConfig
from palm_mtf.config.decode import DecodeConfig
from palm_mtf.config.evaluation import TaskEvalConfig
from palm_mtf.config.fault_tolerance import WatchConfig
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import PalmConfig
from palm_mtf.config.optimizer import AdafactorConfig
from palm_mtf.config.pods import PodsConfig
from palm_mtf.config.run import RunConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What a command is configured by: one part for each kind of setting.

  Attributes:
    model: the architecture.
    mesh_layout: devices of a pod, and what is split over them.
    optimizer: Adafactor, its schedule and the z-loss.
    data: documents and vocabulary.
    run: lengths, batch size, seed and prompts.
    pods: how many there are, and where.
    fault_tolerance: skipped batches, loss spikes, and the watchdog.
    decode: how tokens are chosen.
    evaluation: SeqIO tasks, and of which checkpoints.
  """

  model: PalmConfig
  mesh_layout: MeshLayout
  optimizer: AdafactorConfig
  data: DataConfig
  run: RunConfig
  pods: PodsConfig = dataclasses.field(default_factory=PodsConfig)
  fault_tolerance: WatchConfig = dataclasses.field(default_factory=WatchConfig)
  decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)
  evaluation: TaskEvalConfig = dataclasses.field(default_factory=TaskEvalConfig)
