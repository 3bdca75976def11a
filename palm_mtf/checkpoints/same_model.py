# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Opens the newest checkpoint, and checks that it fits the settings."""

import dataclasses
import logging
from collections.abc import Mapping

from palm_mtf.architecture.parameters import parameter_shapes
from palm_mtf.checkpoints.manifest import (
  Checkpoint,
  newest_whole,
  read_and_hold,
)
from palm_mtf.config import CorpusConfig, DataConfig
from palm_mtf.data.batches.corpus import Corpus
from palm_mtf.data.vocabulary.load import load_vocabulary
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError

_SHOWN_DIFFERENCES = 3


def open_newest(
  model_dir: str, config: CorpusConfig
) -> tuple[Checkpoint, Vocabulary]:
  """Returns the `newest_checkpoint` of a run, and the run's vocabulary.

  Raises:
    UserError: there is no whole checkpoint, or its model or vocabulary is not
      that of the settings.
  """
  shapes = parameter_shapes(config.model)
  checkpoint = newest_checkpoint(model_dir, shapes)
  vocabulary = load_vocabulary(
    model_dir, config.data, vocab_size=config.model.vocab_size
  )
  check_same_model(checkpoint, shapes, vocabulary.sha256)
  return checkpoint, vocabulary


def newest_checkpoint(
  model_dir: str, shapes: Mapping[str, tuple[int, ...]]
) -> Checkpoint:
  """Returns a run's newest whole checkpoint, with its files held open.

  A trainer may remove the checkpoint, but open files stay readable.

  Raises:
    UserError: there is no whole checkpoint, or the shapes of its parameters are
      not `shapes`.
  """
  newest = newest_whole(model_dir, read=read_and_hold)
  if not newest:
    raise UserError(
      f"MODEL_DIR = {model_dir!r}: holds no checkpoint; train one there with "
      "palm_mtf train, or give the folder of a run."
    )
  check_same_model(newest, shapes)
  return newest


def check_same_model(
  checkpoint: Checkpoint,
  shapes: Mapping[str, tuple[int, ...]],
  vocabulary_sha256: str | None = None,
) -> None:
  """Raises UserError if a checkpoint belongs to another model or vocabulary.

  `shapes` has the shape of every parameter of the model, by name. If the hash
  of the run's vocabulary is None, vocabularies are not compared.
  """
  if different := shape_differences(checkpoint.manifest.shapes, shapes):
    raise UserError(
      f"{checkpoint.path} has {different}: it is of another model; use the "
      "models/*.gin it was trained with, or another MODEL_DIR."
    )
  if vocabulary_sha256 not in (None, checkpoint.manifest.vocabulary_sha256):
    raise UserError(
      f"{checkpoint.path} was trained with another vocabulary than VOCABULARY; "
      "its tokens would mean other texts. Use its own, or another MODEL_DIR."
    )


def shape_differences(
  held: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> str:
  """Returns text on the parameters whose shapes differ; "" if none differ.

  `held` and `wanted` are {parameter: shape} of the checkpoint and of the model.
  """
  different = [
    f"{name} {_shape_text(held.get(name))}, the model wants "
    f"{_shape_text(wanted.get(name))}"
    for name in dict.fromkeys([*wanted, *held])  # in the model's order
    if held.get(name) != wanted.get(name)
  ]
  text = "; ".join(different[:_SHOWN_DIFFERENCES])
  more = len(different) - _SHOWN_DIFFERENCES
  return f"{text}; and {more} more" if more > 0 else text


def _shape_text(shape: tuple[int, ...] | None) -> str:
  return "nothing" if shape is None else str(list(shape))


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
