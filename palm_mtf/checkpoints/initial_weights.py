# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""INIT_CHECKPOINT: the checkpoint of another run that a new run starts from.

INIT_STATE = "weights"   step and optimizer start anew: finetuning (PaLM 6)
INIT_STATE = "all"       they go on, on other data (PaLM Appendix F)
"""

import dataclasses
import logging
import os
from collections.abc import Mapping

from palm_mtf.accounting.optimizer_state import check_same_slots
from palm_mtf.checkpoints.locate import NamedWeights, find_weights, read_shapes
from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.checkpoints.same_model import shape_differences
from palm_mtf.config import AdafactorConfig, DataConfig, RunConfig
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError
from palm_mtf.model_dir.layout import ModelDir

_logger = logging.getLogger(__name__)


def find_initial_weights(
  path: str | None,
  newest: Checkpoint | None,
  shapes: Mapping[str, tuple[int, ...]],
) -> NamedWeights | None:
  """Returns the weights to start from, None for random first weights.

  Args:
    path: INIT_CHECKPOINT.
    newest: newest checkpoint of this run, which takes precedence over `path`.
    shapes: shape of every parameter of the model, by name.

  Raises:
    UserError: `path` is missing, damaged or of another model.
  """
  if path is None:
    return None
  if newest:
    _logger.info(
      f"INIT_CHECKPOINT is not read: {newest.path} is this run's own"
    )
    return None
  # Unusable weights are an error: a run that was given weights never starts
  # from random ones instead.
  weights = find_weights("INIT_CHECKPOINT", path)
  if weights.checkpoint:
    held = weights.checkpoint.manifest.shapes
  else:
    # A TensorFlow checkpoint has no manifest and mixes parameters with
    # optimizer slots, which are named "<parameter>/<slot>".
    held = {
      name: shape
      for name, shape in read_shapes(weights).items()
      if name.rpartition("/")[0] not in shapes
    }
  if different := shape_differences(held, shapes):
    raise UserError(
      f"{weights.given}: {weights.place} has {different}: it is of another "
      "model; use the models/*.gin it was trained with."
    )
  return weights


def whole_state(
  weights: NamedWeights, run: RunConfig, optimizer: AdafactorConfig
) -> Checkpoint:
  """Returns the checkpoint that a run goes on from as from one of its own.

  Args:
    weights: weights that INIT_CHECKPOINT names.
    run: settings of the run.
    optimizer: optimizer settings of the run.

  Raises:
    UserError: it has no optimizer state, that of other settings, or as many
      steps as the run.
  """
  found = weights.checkpoint
  if not found:
    raise UserError(
      f'{weights.given}: INIT_STATE = "all", and a checkpoint of TensorFlow '
      "does not say its step; give one of palm_mtf, or set INIT_STATE to "
      '"weights".'
    )
  check_same_slots(found.path, found.manifest.settings, optimizer)
  step = found.manifest.step
  if step >= run.train_steps:
    raise UserError(
      f"TRAIN_STEPS = {run.train_steps}: {weights.given} has {step} steps "
      "behind it, which count; give more."
    )
  # Loss spikes were skipped in its batches, not in those of this run.
  data = {k: v for k, v in found.manifest.data.items() if k != "spikes"}
  manifest = dataclasses.replace(found.manifest, data=data)
  return dataclasses.replace(found, manifest=manifest)


def check_vocabulary_given(
  weights: NamedWeights | None, model_dir: str, data: DataConfig
) -> None:
  """Raises UserError if a run would train a new vocabulary for old weights."""
  # Rows of the embedding belong to the token ids of one vocabulary.
  own = ModelDir(model_dir).vocabulary
  if not weights or data.vocabulary is not None or os.path.exists(own):
    return
  hint = ""
  if weights.checkpoint:
    # <run>/checkpoints/step_00000200 -> <run>
    run = os.path.dirname(os.path.dirname(weights.checkpoint.path))
    theirs = weights.checkpoint.manifest.settings.get("VOCABULARY")
    theirs = theirs or ModelDir(run).vocabulary
    hint = f", such as {theirs!r}" if os.path.exists(theirs) else ""
  raise UserError(
    f"VOCABULARY = None: {weights.given} was trained with a vocabulary of its "
    f"own; set VOCABULARY to it{hint}."
  )


def check_same_vocabulary(
  weights: NamedWeights | None, vocabulary: Vocabulary
) -> None:
  """Raises UserError if `weights` were trained with another vocabulary."""
  if not weights:
    return
  if not weights.checkpoint:
    _logger.warning(
      f"{weights.place} does not say which vocabulary it was trained with: "
      "see to it yourself that VOCABULARY is the one"
    )
  elif weights.checkpoint.manifest.vocabulary_sha256 != vocabulary.sha256:
    raise UserError(
      f"{weights.given}: {weights.place} was trained with another vocabulary "
      "than VOCABULARY; its tokens would mean other texts; set VOCABULARY and "
      "EXTRA_IDS to its own."
    )
