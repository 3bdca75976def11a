# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Adafactor's settings."""

import dataclasses
from typing import Annotated, ClassVar, Literal

from palm_mtf.config.checked import real
from palm_mtf.config.optimizer import OptimizerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdafactorConfig(OptimizerConfig):
  """Adafactor (Shazeer and Stern 2018) in PaLM's form and others (PaLM 5).

  If the paper leaves a choice open, the default is our reading of the paper.

  Attributes:
    beta2_exponent: beta2 = 1 - k ** -beta2_exponent at step k = 1, 2, ...
    update_clip: maximum root mean square of an update, before lr and
      parameter_scale multiply the update; None does not clip. The gin files
      clip, as the Adafactor paper does; the PaLM paper does not mention it.
    weight_decay_exponent: each step subtracts lr ** weight_decay_exponent times
      the parameter; None turns weight decay off.
    second_moment: "full", as in PaLM, or "factored", which keeps only the means
      of rows and of columns.
    parameter_scale: factor of lr in an update. "variable": the root mean square
      of each variable. "stacked": the root mean square of all matrices that
      PaLM's own code stacked in one variable (optim/adafactor.py). "off": 1.
    parameter_scale_floor: minimum of parameter_scale, unless it is "off".
  """

  slot_settings: ClassVar = ("second_moment", "beta1", "momentum_dtype")

  optimizer: str = "adafactor"
  # PaLM (section 5) and Adafactor (section 7.2) use 0.8.
  beta2_exponent: Annotated[float, real(0.01, 2.0)]
  update_clip: Annotated[float | None, real(1e-3, 1e9, "for no clipping")]
  weight_decay_exponent: Annotated[
    float | None, real(0.1, 99.0, "for no decay")
  ]
  second_moment: Literal["full", "factored"] = "full"
  parameter_scale: Literal["variable", "stacked", "off"] = "variable"
  parameter_scale_floor: Annotated[float, real(1e-12, 1e3)] = 1e-3

  def slots(self, rank: int, is_kernel: bool) -> list[tuple[str, str, str]]:
    """Returns the slots of a parameter, the momentum last."""
    found = [("second_moment", "all", "float32")]
    if self.second_moment == "factored" and rank > 1:
      found = [
        ("second_moment_row", "rows", "float32"),
        ("second_moment_column", "columns", "float32"),
      ]
    if self.beta1:  # with 0, there is no momentum
      found.append(("momentum", "all", self.momentum_dtype))
    return found
