# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds checkpoints that training writes during serving."""

import logging
import os
from collections.abc import Mapping

from palm_mtf.checkpoints.manifest import (
  Checkpoint,
  DamagedCheckpointError,
  RemovedCheckpointError,
  checkpoint_folders,
  read_and_hold,
  read_checkpoint,
)
from palm_mtf.checkpoints.same_model import check_same_model
from palm_mtf.errors import UserError

_logger = logging.getLogger(__name__)

# (name, size, modification time) of each file in a folder.
_State = tuple[tuple[str, int, int], ...]


class NewerCheckpoint:
  """Finds the checkpoint that a newly started server would serve."""

  def __init__(
    self,
    model_dir: str,
    served: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    vocabulary_sha256: str,
  ):
    """Begins with the checkpoint that is served now.

    Args:
      model_dir: MODEL_DIR of the run.
      served: checkpoint that is served now.
      shapes: {name of a parameter: its shape}, for the whole model.
      vocabulary_sha256: hash of the run's SentencePiece model.
    """
    self._model_dir, self._served = model_dir, served.blake2b
    self._shapes, self._vocabulary_sha256 = shapes, vocabulary_sha256
    # {checkpoint that cannot be served: state of its files}. Until the state
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
