# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The settings of plain SGD."""

import dataclasses

from palm_mtf.config.optimizer import OptimizerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SgdConfig(OptimizerConfig):
  """Stochastic gradient descent without momentum; `beta1` is not read."""

  optimizer: str = "sgd"

  def slots(self, rank: int, is_kernel: bool) -> list[tuple[str, str, str]]:
    """Returns no slots."""
    return []
