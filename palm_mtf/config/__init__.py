# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Every setting, as frozen dataclasses that gin macros fill.

A field has the lower-case name of its macro: `num_layers` is NUM_LAYERS. Values
are checked when a dataclass is made, before TensorFlow is imported.
"""

from palm_mtf.config.config import (
  CacheConfig,
  Config,
  ConfigOfSweep,
  CorpusConfig,
  InspectionConfig,
  PlanConfig,
  PodStepConfig,
  StepConfig,
  SweepConfig,
)
from palm_mtf.config.data import DataConfig, FilterConfig
from palm_mtf.config.decode import DecodeConfig
from palm_mtf.config.exchange import ExchangeConfig
from palm_mtf.config.hardware import HardwareConfig
from palm_mtf.config.learners import LearnersConfig
from palm_mtf.config.loss import LossConfig
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import ModelConfig
from palm_mtf.config.optimizer import (
  OPTIMIZERS,
  AdafactorConfig,
  AdamwConfig,
  MuonConfig,
  OptimizerConfig,
)
from palm_mtf.config.pods import PodsConfig
from palm_mtf.config.run import RunConfig
from palm_mtf.config.task_eval import FewShotConfig, TaskEvalConfig
from palm_mtf.config.watch import WatchConfig

__all__ = [
  "OPTIMIZERS",
  "AdafactorConfig",
  "AdamwConfig",
  "CacheConfig",
  "Config",
  "ConfigOfSweep",
  "CorpusConfig",
  "DataConfig",
  "DecodeConfig",
  "ExchangeConfig",
  "FewShotConfig",
  "FilterConfig",
  "HardwareConfig",
  "InspectionConfig",
  "LearnersConfig",
  "LossConfig",
  "MeshLayout",
  "ModelConfig",
  "MuonConfig",
  "OptimizerConfig",
  "PlanConfig",
  "PodStepConfig",
  "PodsConfig",
  "RunConfig",
  "StepConfig",
  "SweepConfig",
  "TaskEvalConfig",
  "WatchConfig",
]

# Settings of LossConfig that gin files may also bind as settings of
# AdafactorConfig, which had them in earlier versions.
FORMERLY_OF_ADAFACTOR = ("z_loss", "dropout")
