# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""--against: compares a model with another, as llama-perplexity does."""

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.checkpoints.teacher import teacher_model
from palm_mtf.checkpoints.weights_to_load import find_weights, settings_of
from palm_mtf.config import Config, mesh_layout
from palm_mtf.config.neighbours import refuse_neighbours
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError
from palm_mtf.model_dir.paths import ModelDir

if TYPE_CHECKING:  # the module imports TensorFlow
  from palm_mtf.generation.inference.scorer import Divergence


def open_other(
  path: str, config: Config, vocabulary: Vocabulary
) -> tuple[Checkpoint, Config]:
  """Returns the checkpoint that --against names, held open, and its settings.

  Its weights are used as they are, not as int8 or int4.

  Raises UserError if it is missing, damaged, or has another vocabulary, or if
  it reads shorter texts.
  """
  weights = find_weights("--against", path)
  found, given = weights.checkpoint, weights.given
  if not found:
    raise UserError(
      f"{given}: is no checkpoint of palm_mtf; import the model first."
    )
  found = dataclasses.replace(found, held=weights.files)
  model = teacher_model(found, config.model)
  refuse_neighbours(model, given)
  if model.vocab_size != config.model.vocab_size or not _is_same(
    found, vocabulary
  ):
    raise UserError(
      f"{given}: {weights.place} has another vocabulary than MODEL_DIR; "
      "compare models whose tokens mean the same."
    )
  length = config.model.sequence_length
  if model.positions != "learned":  # it can read rows of any length
    model = dataclasses.replace(model, sequence_length=length)
  if model.sequence_length < length:
    raise UserError(
      f"SEQUENCE_LENGTH = {length:,}: {weights.place} reads at most "
      f"{model.sequence_length:,} tokens; lower it."
    )
  try:
    mesh_layout.check_layout(config.mesh_layout, model)
  except UserError as error:
    raise UserError(f"{given}: {weights.place}: {error}") from None
  decode = dataclasses.replace(config.decode, weight_dtype="activation")
  return found, dataclasses.replace(config, model=model, decode=decode)


def _is_same(checkpoint: Checkpoint, vocabulary: Vocabulary) -> bool:
  # Imports of one model from two formats have tokenizer files that differ.
  if checkpoint.manifest.vocabulary_sha256 == vocabulary.sha256:
    return True
  run = os.path.dirname(os.path.dirname(checkpoint.path))
  settings = settings_of(checkpoint.manifest)
  path = settings.get("VOCABULARY") or ModelDir(run).vocabulary
  other = open_vocabulary(str(path), setting="--against")
  if (other.size, other.eod_id) != (vocabulary.size, vocabulary.eod_id):
    return False
  ids = range(other.size)
  return all(other.piece(x) == vocabulary.piece(x) for x in ids)


def describe_divergence(found: Sequence["Divergence"]) -> dict[str, float]:
  """Returns statistics of all tokens of several texts."""
  each = map(np.concatenate, zip(*found, strict=True))
  loss, loss_of_other, kl, agrees = each
  return {
    "tokens": len(kl),
    "perplexity": float(np.exp(loss.mean())),
    "perplexity_of_other": float(np.exp(loss_of_other.mean())),
    "kl_divergence": float(kl.mean()),
    "kl_divergence_99th": float(np.percentile(kl, 99)),
    "top_1_agreement": float(agrees.mean()),
  }
