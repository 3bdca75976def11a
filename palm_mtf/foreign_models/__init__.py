# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a user's Mesh TensorFlow model; one process controls all pods.

Importing this package makes AdafactorConfig and the settings of the other
optimizers, DeviceMesh, PodsConfig, PodTraining and train_on_pods gin
configurables of the module `palm_mtf.foreign_models`.
"""

from palm_mtf.config import AdafactorConfig, AdamwConfig, MuonConfig, PodsConfig
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.foreign_models.gin_run import main, parse_gin, train_on_pods
from palm_mtf.foreign_models.training import ModelFunction, PodTraining

__all__ = [
  "AdafactorConfig",
  "AdamwConfig",
  "DeviceMesh",
  "ModelFunction",
  "MuonConfig",
  "PodTraining",
  "PodsConfig",
  "main",
  "parse_gin",
  "train_on_pods",
]
