# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of optimizers."""

from palm_mtf.config.adafactor import AdafactorConfig
from palm_mtf.config.adamw import AdamwConfig
from palm_mtf.config.muon import MuonConfig
from palm_mtf.config.optimizer import OptimizerConfig
from palm_mtf.config.sgd import SgdConfig

# {value of OPTIMIZER: its settings}. For XConfig, palm_mtf/optim/<name>.py has
# the class X, a `Rule`. The first is the default.
OPTIMIZERS: dict[str, type[OptimizerConfig]] = {
  "adafactor": AdafactorConfig,
  "adamw": AdamwConfig,
  "muon": MuonConfig,
  "sgd": SgdConfig,
}
