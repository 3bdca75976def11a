# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Warns if the held-out text is not the text that was held out in training."""

import dataclasses
import logging

from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.config import DataConfig
from palm_mtf.data.batches.corpus import Corpus

_logger = logging.getLogger(__name__)


def warn_of_other_evaluation_text(
  checkpoint: Checkpoint, corpus: Corpus, data: DataConfig
) -> None:
  """Warns if the validation text is not the text held out in training."""
  if not _is_other(checkpoint, corpus):
    return
  before, now = _share_before(checkpoint, data), data.validation_share
  if before == now:
    _logger.warning(
      f"the text or its tokens have changed since {checkpoint.path} was "
      "trained: the validation text may have been trained on"
    )
  elif before < now:
    _logger.warning(
      f"VALIDATION_SHARE = {now}, but {before} in training: part of the "
      "validation text was trained on"
    )
  else:
    _logger.warning(
      f"VALIDATION_SHARE = {now}, but {before} in training: the validation "
      "loss covers only a part of the text that was held out"
    )


def warn_of_larger_share(checkpoint: Checkpoint, data: DataConfig) -> None:
  """Warns if tasks of palm_mtf.tasks.corpus use text that was trained on."""
  before, now = _share_before(checkpoint, data), data.validation_share
  if data.task is None and before < now:
    _logger.warning(
      f"VALIDATION_SHARE = {now}, but {before} in training: tasks on held-out "
      "text also use text that the model was trained on"
    )


def warn_of_other_split(
  checkpoint: Checkpoint, corpus: Corpus, data: DataConfig
) -> None:
  """Warns if a resumed run holds out other validation text than before."""
  before, now = _share_before(checkpoint, data), data.validation_share
  if before == now or not _is_other(checkpoint, corpus):
    return
  what = (
    "text that was trained on is held out from here on, and validation losses "
    "are too low"
    if before < now
    else "text that was held out becomes training text"
  )
  _logger.warning(f"VALIDATION_SHARE = {now}, but {before} until now: {what}")


def _is_other(checkpoint: Checkpoint, corpus: Corpus) -> bool:
  """Returns whether other documents are used, or held out, than in training."""
  trained = checkpoint.manifest.data
  # The packing of documents into rows is not compared.
  in_its_rows = dataclasses.replace(
    corpus,
    packing=trained.get("PACKING", corpus.packing),
    sequence_length=trained.get("SEQUENCE_LENGTH", corpus.sequence_length),
  )
  return trained.get("the tokens") != in_its_rows.fingerprint


def _share_before(checkpoint: Checkpoint, data: DataConfig) -> float:
  settings = checkpoint.manifest.settings
  return settings.get("VALIDATION_SHARE", data.validation_share)
