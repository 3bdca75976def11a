# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""AdamW's settings."""

import dataclasses
from typing import Annotated

from palm_mtf.config.checked import real
from palm_mtf.config.optimizer import OptimizerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamwConfig(OptimizerConfig):
  """Adam with decoupled weight decay (Loshchilov and Hutter 2019).

  Attributes:
    beta2: decay of the second moment.
    weight_decay: each step subtracts lr * weight_decay times the parameter, as
      in PyTorch and Optax.
    adam_epsilon: number that is added to the root of the second moment.
  """

  optimizer: str = "adamw"
  beta2: Annotated[float, real(0.0, 0.999999)]
  weight_decay: Annotated[float, real(0.0, 10.0)]
  adam_epsilon: Annotated[float, real(1e-20, 1e-2)] = 1e-8

  def slots(self, rank: int, is_kernel: bool) -> list[tuple[str, str, str]]:
    """Returns the same two slots for each parameter."""
    return [
      ("second_moment", "all", "float32"),
      ("momentum", "all", self.momentum_dtype),
    ]
