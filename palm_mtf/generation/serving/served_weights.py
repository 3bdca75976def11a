# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights of the checkpoint that a server serves."""

import logging
import os
import time
from collections.abc import Sequence

from palm_mtf._tf import tf
from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.config import MeshLayout, PalmConfig
from palm_mtf.errors import UserError
from palm_mtf.generation.inference.scorer import Scorer
from palm_mtf.generation.inference.sessions import LoadedDecoder
from palm_mtf.generation.inference.slot_decoder import Chosen, SlotDecoder

_logger = logging.getLogger(__name__)


class ServedWeights:
  """Weights of one checkpoint at a time; a context manager that frees them.

  Attributes:
    decoder: decoder with the weights; None while no weights are loaded.
    step: training step of the loaded checkpoint.
    created: time of the loaded checkpoint, in seconds since 1970.
  """

  def __init__(
    self,
    model: PalmConfig,
    mesh: MeshLayout,
    weight_dtype: str,
    *,
    num_tokens: int,
    num_slots: int,
  ):
    """Takes the settings that all checkpoints share.

    `num_tokens` is the number of pieces in the vocabulary, and `num_slots` the
    maximum number of texts that are decoded together.
    """
    self._model, self._mesh, self._weight_dtype = model, mesh, weight_dtype
    self._num_tokens, self._num_slots = num_tokens, num_slots
    self._checkpoint: Checkpoint | None = None
    self._loaded: LoadedDecoder | None = None
    self._scorer: Scorer | None = None
    self.decoder: SlotDecoder | None = None
    self.step = self.created = 0

  def __enter__(self) -> "ServedWeights":
    return self

  def __exit__(self, *unused: object) -> None:
    self._free()

  def load(self, checkpoint: Checkpoint) -> None:
    """Frees the current weights, and loads a checkpoint's weights.

    Raises:
      UserError: if there is too little memory for the slots.
    """
    self._free()
    self._loaded = LoadedDecoder(
      checkpoint, self._model, self._mesh, self._weight_dtype, for_steps=True
    )
    self._scorer = Scorer(self._loaded)
    try:
      self.decoder = SlotDecoder(
        self._loaded, self._num_tokens, self._num_slots
      )
    except tf.errors.ResourceExhaustedError:
      raise UserError(
        f"--slots = {self._num_slots:,}: there is too little memory for their "
        "cache; give fewer."
      ) from None
    self._checkpoint = checkpoint
    self.step = checkpoint.manifest.step
    try:
      self.created = int(os.path.getmtime(checkpoint.path))
    except OSError:  # training has removed the checkpoint
      self.created = int(time.time())

  def replace(self, checkpoint: Checkpoint) -> None:
    """Loads a newer checkpoint; if that fails, reloads the current one."""
    before = self._checkpoint
    try:
      self.load(checkpoint)
    except (tf.errors.OpError, OSError, UserError) as error:
      reason = str(error).partition("\n")[0]
      _logger.warning(f"{checkpoint.path} cannot be loaded: {reason}")
      self.load(before)
    _logger.info(f"serving step {self.step:,}")

  def score(self, ids: Sequence[int]) -> list[Chosen]:
    """Returns log p of all tokens of a prompt except the first token."""
    return self._scorer.score_prompt(ids)

  def _free(self) -> None:
    # The weights are freed once the client is closed and has no references.
    if self._loaded:
      self._loaded.client.close()
    self._loaded = self._scorer = self.decoder = None
