# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The settings of each optimizer, and what memory it needs."""

import abc
import dataclasses
from typing import Annotated, ClassVar, Literal

from palm_mtf.config.checked import Checked, Count, real
from palm_mtf.errors import UserError, check_choice


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Checked, abc.ABC):
  """Settings of any optimizer.

  Attributes:
    optimizer: name in OPTIMIZERS, and of the module in palm_mtf/optim/ that
      computes the updates.
    learning_rate: lr = min(learning_rate, 1 / sqrt(k)) at step k = 1, 2, ...
      With 0, no step changes a parameter.
    beta1: decay of the momentum; with 0, Adafactor keeps no momentum.
    gradient_clip: maximum global norm of all gradients.
    learning_rate_schedule: "palm", the formula above; "constant", learning_rate
      at every step; or "cosine", from learning_rate to a tenth of it.
    learning_rate_decay_steps: steps of the cosine, usually %TRAIN_STEPS; None
      for other schedules.
    momentum_dtype: dtype of the momentum in memory and in checkpoints. The
      second moment is always float32, because near beta2 = 1 its changes are
      too small for bfloat16.
    weight_decay_on: parameters that decay: "all", as in PaLM, "all_but_scales"
      (all but the scales of norms), or "kernels" (neither scales nor the
      embedding).
    norm_scale: what is trained for the scale of a norm. "zero_centered":
      scale - 1, as in Google's published code. Decay then pulls scales to 1,
      and Adafactor's learning rate is relative to scale - 1. "plain": the scale
      itself, which decay pulls to 0. Checkpoints hold the scale in both cases.
    keep_zeros: whether a weight of a layer's kernels that is 0 stays 0, as in a
      pruned model.
  """

  # The settings that decide which slots parameters have.
  slot_settings: ClassVar[tuple[str, ...]] = ("momentum_dtype",)

  # The bounds reject typos, not unusual choices.
  optimizer: str
  learning_rate: Annotated[float, real(0.0, 10.0)]
  beta1: Annotated[float, real(0.0, 0.9999)]
  gradient_clip: Annotated[float, real(1e-6, 1e9)]
  learning_rate_schedule: Literal["palm", "constant", "cosine"] = "palm"
  learning_rate_decay_steps: Count | None = None
  momentum_dtype: Literal["float32", "bfloat16"] = "float32"
  weight_decay_on: Literal["all", "all_but_scales", "kernels"] = "all"
  norm_scale: Literal["zero_centered", "plain"] = "zero_centered"
  keep_zeros: bool = False

  def __post_init__(self) -> None:
    super().__post_init__()
    own = type(self).__dataclass_fields__["optimizer"].default
    check_choice("OPTIMIZER", self.optimizer, [str(own)])
    steps = self.learning_rate_decay_steps
    if (self.learning_rate_schedule == "cosine") != (steps is not None):
      raise UserError(
        f"LEARNING_RATE_DECAY_STEPS = {steps}: is the length of "
        'LEARNING_RATE_SCHEDULE = "cosine"; give a number of steps with it, '
        "such as %TRAIN_STEPS, and None with other schedules."
      )

  @abc.abstractmethod
  def slots(self, rank: int, is_kernel: bool) -> list[tuple[str, str, str]]:
    """Returns the variables that the optimizer keeps for a parameter.

    Args:
      rank: number of dimensions of the parameter.
      is_kernel: whether it is a kernel, not an embedding, scale or bias.

    Returns:
      For each slot, its name, such as "momentum"; which dimensions of the
      parameter it has, "all", "rows" or "columns"; and its dtype, "float32" or
      "bfloat16". Slots start at 0.
    """

  def newton_schulz_steps(self, rank: int, is_kernel: bool) -> int:
    """Returns in how many steps the update of a parameter is orthogonalized."""
    return 0


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class SgdConfig(OptimizerConfig):
  """Stochastic gradient descent without momentum; `beta1` is not read."""

  optimizer: str = "sgd"

  def slots(self, rank: int, is_kernel: bool) -> list[tuple[str, str, str]]:
    """Returns no slots."""
    return []


# {value of OPTIMIZER: its settings}. For XConfig, palm_mtf/optim/<name>.py has
# the class X, a `Rule`. The first is the default.
OPTIMIZERS: dict[str, type[OptimizerConfig]] = {
  "adafactor": AdafactorConfig,
  "adamw": AdamwConfig,
  "muon": MuonConfig,
  "sgd": SgdConfig,
}
