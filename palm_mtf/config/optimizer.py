# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The settings that all optimizers have, and what memory they need."""

import abc
import dataclasses
from typing import Annotated, ClassVar, Literal

from palm_mtf.config.checked import Checked, Count, real
from palm_mtf.errors import UserError, check_choice


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Checked, abc.ABC):
  """Settings of any optimizer.

  Attributes:
    optimizer: name in the table of optimizers (config/optimizers.py), and of
      the module in palm_mtf/optim/ that computes the updates.
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
