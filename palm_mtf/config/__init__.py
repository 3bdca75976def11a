# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Every setting, as frozen dataclasses that gin macros fill.

A field has the lower-case name of its macro: `num_layers` is NUM_LAYERS. Values
are checked when a dataclass is made, so that a wrong one is found before
TensorFlow is imported.
"""

from palm_mtf.config.config import (
  Config,
  ConfigOfSweep,
  CorpusConfig,
  PlanConfig,
  StatisticsConfig,
)
from palm_mtf.config.data import DataConfig
from palm_mtf.config.decode import DecodeConfig
from palm_mtf.config.evaluation import TaskEvalConfig
from palm_mtf.config.fault_tolerance import WatchConfig
from palm_mtf.config.few_shot import FewShotConfig
from palm_mtf.config.filters import FilterConfig
from palm_mtf.config.hardware import HardwareConfig
from palm_mtf.config.inspection import InspectionConfig
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import PalmConfig
from palm_mtf.config.optimizer import AdafactorConfig
from palm_mtf.config.pods import PodsConfig
from palm_mtf.config.run import RunConfig
from palm_mtf.config.sweep import SweepConfig

__all__ = [
  "AdafactorConfig",
  "Config",
  "ConfigOfSweep",
  "CorpusConfig",
  "DataConfig",
  "DecodeConfig",
  "FewShotConfig",
  "FilterConfig",
  "HardwareConfig",
  "InspectionConfig",
  "MeshLayout",
  "PalmConfig",
  "PlanConfig",
  "PodsConfig",
  "RunConfig",
  "StatisticsConfig",
  "SweepConfig",
  "TaskEvalConfig",
  "WatchConfig",
]
