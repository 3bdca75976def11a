# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The learning rate at step k = 1, 2, ... (PaLM, section 5).

lr(k)        = min(LEARNING_RATE, 1 / sqrt(k))    "palm"
             = LEARNING_RATE                       "constant"
             = LEARNING_RATE (0.1 + 0.9 (1 + cos(pi k / K)) / 2)    "cosine"

K is LEARNING_RATE_DECAY_STEPS. After K steps the cosine stays at a tenth of
LEARNING_RATE (Hoffmann et al. 2022, section 3.1).
"""

import math

from palm_mtf._tf import tf
from palm_mtf.config import OptimizerConfig

_LEAST = 0.1  # the cosine ends at this share of LEARNING_RATE


def learning_rate(k: tf.Tensor, config: OptimizerConfig) -> tf.Tensor:
  """Returns lr(k), [] float32, for step k, [] float32."""
  if config.learning_rate_schedule == "constant":
    return tf.constant(config.learning_rate, tf.float32)
  if config.learning_rate_schedule == "cosine":
    done = tf.minimum(k / config.learning_rate_decay_steps, 1.0)
    share = _LEAST + (1 - _LEAST) * (1 + tf.cos(math.pi * done)) / 2
    return config.learning_rate * share
  return tf.minimum(config.learning_rate, tf.math.rsqrt(k))
