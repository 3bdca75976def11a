# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A trained model, and what an export format makes of it."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.config import Config, ModelConfig
from palm_mtf.data.batches.packing import (
  document_start,
  prompt_start,
  row_start,
)
from palm_mtf.data.vocabulary.vocabulary import Vocabulary

Reader = Callable[[str], np.ndarray]  # parameter's name -> its value, float32


@dataclasses.dataclass(frozen=True)
class TrainedModel:
  """A checkpoint with its run's settings and vocabulary."""

  config: Config
  checkpoint: Checkpoint
  vocabulary: Vocabulary

  @property
  def model(self) -> ModelConfig:
    """The architecture."""
    return self.config.model

  @property
  def described(self) -> ModelConfig:
    """The architecture, with the sequence length that exports name.

    If a run shortened the sequences of an imported model, this is the length of
    the imported model, which is longer than SEQUENCE_LENGTH.
    """
    length = max(
      self.config.data.context_length or 0, self.model.sequence_length
    )
    if self.model.positions == "learned":  # no embeddings of further positions
      return self.model
    return dataclasses.replace(self.model, sequence_length=length)

  @property
  def start_id(self) -> int:
    """Id of the token before a document."""
    return document_start(self.config.data, self.vocabulary)

  @property
  def row_start(self) -> int:
    """Id of the token at the start of a row that begins within a document."""
    return row_start(self.config.data, self.vocabulary)

  @property
  def prompt_start(self) -> int | None:
    """Id of the token before a prompt; None if prompts have no start token."""
    return prompt_start(self.config.data, self.vocabulary)

  @property
  def bos_id(self) -> int | None:
    """Id of the start token that exports name, even if prompts omit it."""
    added, data = self.prompt_start, self.config.data
    return data.start_id if added is None else added


class Export(NamedTuple):
  """A model in an export format.

  The function that makes it raises UserError if the format cannot express the
  model.
  """

  kind: str  # noun phrase for messages, such as "a CohereForCausalLM"
  num_bytes: int  # upper bound of the size of the file or folder
  # Writes the file or folder, given its path and a reader of parameters.
  write: Callable[[str, Reader], None]
  subfolder: str = ""  # folder to make in --output; "" for --output itself
