# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The loss that training minimizes."""

import dataclasses
from typing import Annotated

from palm_mtf.config.checked import Checked, real


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig(Checked):
  """The loss besides the cross-entropy, and the dropout that regularizes it.

  Attributes:
    z_loss: weight in the loss of log(Z) ** 2; Z is the softmax normalizer.
    dropout: share of the activations that are dropped, for finetuning.
  """

  z_loss: Annotated[float, real(0.0, 1.0)]  # 1e-4 in PaLM (section 5)
  dropout: Annotated[float, real(0.0, 0.99)] = 0.0
