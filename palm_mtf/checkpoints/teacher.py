# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the teacher of a run (TEACHER), and checks that it fits."""

import dataclasses

from palm_mtf.checkpoints.adapter_base import with_base
from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.checkpoints.weights_to_load import (
  NamedWeights,
  find_weights,
  settings_of,
)
from palm_mtf.config import Config, ModelConfig
from palm_mtf.config.macros import from_macros, values_of
from palm_mtf.config.mesh_layout import check_layout
from palm_mtf.config.neighbours import refuse_neighbours
from palm_mtf.errors import UserError

# {macro: the only value with which a run, or its teacher, can be}
_ONLY = {"PREFERENCE_BETA": None, "OBJECTIVE": "causal", "ADAPTER_LENGTH": None}


def find_teacher(
  config: Config, newest: Checkpoint | None
) -> NamedWeights | None:
  """Returns the weights of TEACHER, held open; None if there is no teacher.

  `newest` is the run's newest checkpoint, None if there is none.

  Raises UserError if a setting does not fit a teacher, or if the teacher is
  missing, damaged, of another size or objective, or not that of the run.
  """
  loss, model = config.loss, config.model
  if loss.teacher is None:
    return None
  given = f"TEACHER = {loss.teacher!r}"
  _check_values(given, values_of(config), _ONLY)
  if loss.teacher_targets != "full" and loss.teacher_tokens >= model.vocab_size:
    raise UserError(
      f"TEACHER_TOKENS = {loss.teacher_tokens:,}: give less than VOCAB_SIZE = "
      f'{model.vocab_size:,}, or set TEACHER_TARGETS = "full".'
    )
  weights = find_weights("TEACHER", loss.teacher)
  checkpoint = weights.checkpoint
  if not checkpoint:
    raise UserError(
      f"{given}: is no checkpoint of palm_mtf; train or import a teacher."
    )
  before = newest and newest.manifest.teacher
  if before and before["blake2b"] != checkpoint.blake2b:
    raise UserError(
      f"{given}: is not the teacher of the run, {before['checkpoint']}, whose "
      f"hash is {before['blake2b']}; name that, or use another MODEL_DIR."
    )
  teacher = teacher_model(checkpoint, model)
  refuse_neighbours(teacher, given)
  only = {"VOCAB_SIZE": model.vocab_size, "MODEL_FUNCTION": ""}
  _check_values(f"{given}: {weights.place}", values_of(teacher), _ONLY | only)
  if teacher.sequence_length < model.sequence_length:
    raise UserError(
      f"SEQUENCE_LENGTH = {model.sequence_length:,}: {weights.place}, the "
      f"teacher, reads at most {teacher.sequence_length:,} tokens; lower it."
    )
  try:
    mesh = dataclasses.replace(config.mesh_layout, stages=1, num_microbatches=1)
    check_layout(mesh, teacher, mesh.axis_size_of("batch"), num_pods=1)
  except UserError as error:
    raise UserError(f"{given}: {weights.place}: {error}") from None
  return dataclasses.replace(
    weights,
    checkpoint=with_base(dataclasses.replace(checkpoint, held=weights.files)),
  )


def _check_values(given, values, only) -> None:
  for macro, wanted in only.items():
    if values.get(macro, wanted) != wanted:
      raise UserError(
        f"{given}: {macro} = {values[macro]!r}, but model and teacher need "
        f"{macro} = {wanted!r}."
      )


def teacher_model(checkpoint: Checkpoint, model: ModelConfig) -> ModelConfig:
  """Returns the model of a teacher, with ACTIVATION_DTYPE of `model`."""
  settings = settings_of(checkpoint.manifest)
  dtype = {"ACTIVATION_DTYPE": model.activation_dtype}
  return from_macros(ModelConfig, settings | dtype)
