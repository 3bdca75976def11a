# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains any Mesh TensorFlow model on several pods, from one client."""

from palm_mtf.config import AdafactorConfig, PodsConfig
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.foreign_models.model_function import ModelFunction
from palm_mtf.foreign_models.training import PodTraining

__all__ = [
  "AdafactorConfig",
  "DeviceMesh",
  "ModelFunction",
  "PodTraining",
  "PodsConfig",
]
