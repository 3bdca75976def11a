# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights of the checkpoint that a server serves, and newer checkpoints."""

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence

from palm_mtf._tf import tf
from palm_mtf.checkpoints.adapter_base import with_base
from palm_mtf.checkpoints.manifest import (
  Checkpoint,
  DamagedCheckpointError,
  RemovedCheckpointError,
  checkpoint_folders,
  read_and_hold,
  read_checkpoint,
)
from palm_mtf.checkpoints.weights_to_load import check_same_model
from palm_mtf.config import Config
from palm_mtf.errors import UserError
from palm_mtf.generation.inference.scorer import Scorer
from palm_mtf.generation.inference.sessions import LoadedDecoder
from palm_mtf.generation.inference.slot_decoder import Chosen, SlotDecoder

_logger = logging.getLogger(__name__)

# (name, bytes, modification time in ns) of a folder's files, to see changes.
_State = tuple[tuple[str, int, int], ...]


class ServedWeights(contextlib.AbstractContextManager):
  """Weights of one checkpoint at a time; a context manager that frees them."""

  def __init__(self, config: Config, *, num_tokens: int, num_slots: int):
    """Takes the settings that all checkpoints share.

    `num_tokens` is the number of pieces in the vocabulary, and `num_slots` the
    maximum number of texts that are decoded together.
    """
    self._config = config
    self._num_tokens, self._num_slots = num_tokens, num_slots
    self._checkpoint: Checkpoint | None = None
    self._loaded: LoadedDecoder | None = None
    self._scorer: Scorer | None = None
    self.decoder: SlotDecoder | None = None
    # Training step of the loaded checkpoint, and its time in seconds since
    # 1970.
    self.step = self.created = 0

  def __exit__(self, *unused: object) -> None:
    self._free()

  def load(self, checkpoint: Checkpoint) -> None:
    """Frees the current weights, and loads a checkpoint's weights.

    Raises UserError if there is too little memory for the slots, or an
    adapter's base is missing or changed.
    """
    # Keep the base open, because it may be removed while a run is followed.
    checkpoint = with_base(checkpoint, self._checkpoint)
    self._free()
    self._loaded = LoadedDecoder.of_run(
      checkpoint, self._config, for_steps=True
    )
    self._scorer = Scorer(self._loaded)
    try:
      self.decoder = SlotDecoder(
        self._loaded,
        self._num_tokens,
        self._num_slots,
        prompt_lookup=self._config.decode.prompt_lookup,
      )
      # Texts wait while a newer checkpoint loads, so keep this short: its
      # programs are built when a text first needs them.
      if not self._checkpoint:
        self.decoder.prepare()
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

  def score(self, ids: Sequence[int], adapter: int = 0) -> list[Chosen]:
    """Returns log p of all tokens of a prompt except the first token."""
    return self._scorer.score_prompt(ids, adapter)

  def _free(self) -> None:
    # Drop every reference to the closed client: it would keep the weights.
    if self._loaded:
      self._loaded.close()
    self._loaded = self._scorer = self.decoder = None


class NewerCheckpoint:
  """Finds newer checkpoints, for a server that follows a training run."""

  def __init__(
    self,
    model_dir: str,
    served: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    vocabulary_sha256: str,
  ):
    """Takes what a newer checkpoint must match.

    Args:
      served: checkpoint that is served now.
      shapes: {name of a parameter: its shape}, for the whole model.
      vocabulary_sha256: hash of the run's vocabulary.
    """
    self._model_dir, self._served = model_dir, served.blake2b
    self._shapes, self._vocabulary_sha256 = shapes, vocabulary_sha256
    # {path of a checkpoint that cannot be served: its files}. Until a file
    # changes, the checkpoint is not read again and causes no further warning.
    self._skipped: dict[str, _State] = {}

  def find(self) -> Checkpoint | None:
    """Returns the newest complete checkpoint; None if it is already served.

    The checkpoint's files stay open, so that they can be read even after
    training has removed the checkpoint.
    """
    for path in reversed(checkpoint_folders(self._model_dir)):
      state = _read_state(path)
      if self._skipped.get(path) == state:
        continue
      try:
        if read_checkpoint(path).blake2b == self._served:
          return None
        found = read_and_hold(path)
        check_same_model(found, self._shapes, self._vocabulary_sha256)
      except RemovedCheckpointError:
        return None  # training removed it; the next call finds a newer one
      except (DamagedCheckpointError, UserError) as error:
        self._skipped[path] = state
        _logger.warning(f"{path} is not served: {error}")
        continue
      self._served = found.blake2b
      return found
    return None


def _read_state(path: str) -> _State:
  try:
    with os.scandir(path) as entries:
      found = [(x.name, x.stat()) for x in entries]
  except OSError:
    return ()
  return tuple(sorted((name, x.st_size, x.st_mtime_ns) for name, x in found))
