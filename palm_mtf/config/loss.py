# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The loss that training minimizes."""

import dataclasses
from typing import Annotated, Literal

from palm_mtf.config.checked import Checked, Count, real, text


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig(Checked):
  """The loss besides the cross-entropy, and the dropout that regularizes it.

  Attributes:
    z_loss: weight in the loss of log(Z) ** 2; Z is the softmax normalizer.
    balance_loss: weight in the loss of the imbalance of experts, for ROUTER =
      "softmax". The imbalance is 1 if all experts get equal shares (Fedus et
      al. 2022). Like the cross-entropy, its sum over all tokens, whatever their
      weights, is divided by the sum of the weights.
    router_z_loss: weight in the loss of log(Z) ** 2 of each router; Z is the
      normalizer of the softmax of its scores (Zoph et al. 2022). It is a mean
      like the loss of the balance.
    balance_bias_rate: number by which a step changes the bias of each expert
      (ROUTER_BIAS): up if the expert got fewer choices than the mean, down if
      it got more (DeepSeek-V3).
    dropout: share of the activations that are dropped, for finetuning.
    preference_beta: beta of the loss of pairs, such as 0.1, with which training
      learns to prefer chosen answers to rejected ones (model/preference.py).
      None for the cross-entropy of each token.
    teacher: path, as in INIT_CHECKPOINT, of a checkpoint with the same
      vocabulary, whose distributions the model learns (model/distillation.py);
      None for no teacher.
    teacher_targets: the part of a distribution that the model learns: "full",
      all of it; "top", the likeliest tokens and the probability of the others;
      or "sampled", random tokens.
    teacher_tokens: number of tokens of "top" and "sampled" per position.
    teacher_temperature: divisor of the logits of teacher and model.
    teacher_weight: weight in the loss of the divergence from the teacher; the
      cross-entropy has the rest of 1.
    teacher_cache: folder of what "top" and "sampled" keep, which runs share;
      None for MODEL_DIR/teacher.
  """

  z_loss: Annotated[float, real(0.0, 1.0)]  # 1e-4 in PaLM (section 5)
  balance_loss: Annotated[float, real(0.0, 1.0)] = 0.01  # as in GLaM
  router_z_loss: Annotated[float, real(0.0, 1.0)] = 0.0
  balance_bias_rate: Annotated[float, real(0.0, 1.0)] = 1e-3
  dropout: Annotated[float, real(0.0, 0.99)] = 0.0
  preference_beta: Annotated[float | None, real(1e-6, 1e3)] = None
  teacher: Annotated[
    str | None, text("the path of a checkpoint or of a MODEL_DIR, or None")
  ] = None
  teacher_targets: Literal["full", "top", "sampled"] = "sampled"
  teacher_tokens: Count = 50
  teacher_temperature: Annotated[float, real(0.01, 100.0)] = 1.0
  teacher_weight: Annotated[float, real(0.0, 1.0)] = 0.5
  teacher_cache: Annotated[
    str | None, text("the path of a folder, or None")
  ] = None

  @property
  def teacher_features(self) -> tuple[str, ...]:
    """Names of the features that hold the teacher's distributions."""
    if self.teacher is None:
      return ()
    ids = () if self.teacher_targets == "full" else ("teacher_ids",)
    return *ids, "teacher_log_p"
