# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Muon's settings."""

import dataclasses
from typing import Annotated

from palm_mtf.config.adamw import AdamwConfig
from palm_mtf.config.checked import real


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonConfig(AdamwConfig):
  """Muon (Jordan et al. 2024) for kernels, and AdamW for other parameters.

  Attributes:
    momentum: decay of a kernel's Nesterov momentum; beta1 and beta2 are those
      of the parameters that AdamW updates.
  """

  optimizer: str = "muon"
  momentum: Annotated[float, real(0.0, 0.9999)] = 0.95

  def slots(self, rank: int, is_kernel: bool) -> list[tuple[str, str, str]]:
    """Returns a momentum for a kernel, and AdamW's slots otherwise."""
    if self.newton_schulz_steps(rank, is_kernel):
      return [("momentum", "all", self.momentum_dtype)]
    return super().slots(rank, is_kernel)

  def newton_schulz_steps(self, rank: int, is_kernel: bool) -> int:
    """Returns 5, as published, for kernels: all have two dimensions or more."""
    return 5 if is_kernel and rank > 1 else 0
