# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings that tests of several folders use; imports without TensorFlow."""

import dataclasses

from palm_mtf.config import AdafactorConfig

PALM_OPTIMIZER = AdafactorConfig(
  learning_rate=0.01,
  beta1=0.9,
  beta2_exponent=0.8,
  update_clip=1.0,
  gradient_clip=1.0,
  weight_decay_exponent=2.0,
  z_loss=1e-4,
)
# Of a model function, which has its own loss.
FOREIGN_OPTIMIZER = dataclasses.replace(
  PALM_OPTIMIZER, learning_rate=0.1, weight_decay_exponent=None, z_loss=0.0
)
