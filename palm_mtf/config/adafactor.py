# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Adafactor, its schedule, and the loss it minimizes."""

import dataclasses
from typing import Annotated, Literal

from palm_mtf.config.checked import Checked, Count, real
from palm_mtf.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdafactorConfig(Checked):
  """The optimizer and the loss that it minimizes (PaLM, section 5).

  If the paper leaves a choice open, the default is our reading of the paper.

  Attributes:
    learning_rate: lr = min(learning_rate, 1 / sqrt(k)) at step k = 1, 2, ...
      With 0, no step changes a parameter.
    beta1: decay of the momentum; with 0, no momentum is kept.
    beta2_exponent: beta2 = 1 - k ** -beta2_exponent.
    update_clip: maximum root mean square of an update, before lr and
      parameter_scale multiply the update; None does not clip. The gin files
      clip, as the Adafactor paper does; the PaLM paper does not mention it.
    gradient_clip: maximum global norm of all gradients.
    weight_decay_exponent: each step subtracts lr ** weight_decay_exponent times
      the parameter; None turns weight decay off.
    z_loss: weight in the loss of log(Z) ** 2; Z is the softmax normalizer.
    dropout: share of the activations that are dropped, for finetuning.
    learning_rate_schedule: "palm", the formula above; "constant", learning_rate
      at every step; or "cosine", from learning_rate to a tenth of it.
    learning_rate_decay_steps: steps of the cosine, usually %TRAIN_STEPS; None
      for other schedules.
    second_moment: "full", as in PaLM, or "factored", which keeps only the means
      of rows and of columns.
    momentum_dtype: dtype of the momentum in memory and in checkpoints. The
      second moment is always float32, because near beta2 = 1 its changes are
      too small for bfloat16.
    parameter_scale: factor of lr in an update. "variable": the root mean square
      of each variable. "stacked": the root mean square of all matrices that
      PaLM's own code stacked in one variable (optim/adafactor.py). "off": 1.
    parameter_scale_floor: minimum of parameter_scale, unless it is "off".
    weight_decay_on: parameters that decay: "all", as in PaLM, "all_but_scales"
      (all but the scales of norms), or "kernels" (neither scales nor the
      embedding).
    norm_scale: what is trained for the scale of a norm. "zero_centered":
      scale - 1, as in Google's published code. Decay then pulls scales to 1,
      and the learning rate is relative to scale - 1. "plain": the scale itself,
      which decay pulls to 0. Checkpoints hold the scale in both cases.
  """

  # The bounds reject typos, not unusual choices.
  learning_rate: Annotated[float, real(0.0, 10.0)]
  beta1: Annotated[float, real(0.0, 0.9999)]
  # PaLM (section 5) and Adafactor (section 7.2) use 0.8.
  beta2_exponent: Annotated[float, real(0.01, 2.0)]
  update_clip: Annotated[float | None, real(1e-3, 1e9, "for no clipping")]
  gradient_clip: Annotated[float, real(1e-6, 1e9)]
  weight_decay_exponent: Annotated[
    float | None, real(0.1, 99.0, "for no decay")
  ]
  z_loss: Annotated[float, real(0.0, 1.0)]  # 1e-4 in PaLM
  dropout: Annotated[float, real(0.0, 0.99)] = 0.0
  learning_rate_schedule: Literal["palm", "constant", "cosine"] = "palm"
  learning_rate_decay_steps: Count | None = None
  second_moment: Literal["full", "factored"] = "full"
  momentum_dtype: Literal["float32", "bfloat16"] = "float32"
  parameter_scale: Literal["variable", "stacked", "off"] = "variable"
  parameter_scale_floor: Annotated[float, real(1e-12, 1e3)] = 1e-3
  weight_decay_on: Literal["all", "all_but_scales", "kernels"] = "all"
  norm_scale: Literal["zero_centered", "plain"] = "zero_centered"

  def __post_init__(self) -> None:
    super().__post_init__()
    steps = self.learning_rate_decay_steps
    if (self.learning_rate_schedule == "cosine") != (steps is not None):
      raise UserError(
        f"LEARNING_RATE_DECAY_STEPS = {steps}: is the length of "
        'LEARNING_RATE_SCHEDULE = "cosine"; give a number of steps with it, '
        "such as %TRAIN_STEPS, and None with other schedules."
      )
