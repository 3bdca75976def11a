# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A trained model, and the protocol of export formats."""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import numpy as np

from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.config import Config, PalmConfig
from palm_mtf.data.batches.packing import document_start
from palm_mtf.data.vocabulary.vocabulary import Vocabulary

Reader = Callable[[str], np.ndarray]  # parameter's name -> its value, float32


@dataclasses.dataclass(frozen=True)
class TrainedModel:
  """A checkpoint with its run's settings and vocabulary."""

  config: Config
  checkpoint: Checkpoint
  vocabulary: Vocabulary

  @property
  def model(self) -> PalmConfig:
    """The architecture."""
    return self.config.model

  @property
  def step(self) -> int:
    """Number of training steps before the checkpoint."""
    return self.checkpoint.manifest.step

  @property
  def start_id(self) -> int:
    """Id of the token that the model reads at position 0."""
    return document_start(self.config.data.packing, self.vocabulary.eod_id)


class Format(Protocol):
  """A model in an export format.

  The constructor raises UserError if the format cannot represent the model.

  Attributes:
    num_bytes: upper bound of the size of the file or folder.
    kind: noun phrase for messages, such as "a CohereForCausalLM".
    subfolder: name of the folder to make in --output; "" for --output itself.
  """

  num_bytes: int
  kind: str
  subfolder: str

  def write(self, path: str, read: Reader) -> None:
    """Makes the file or folder `path` from the parameters that `read` reads."""
