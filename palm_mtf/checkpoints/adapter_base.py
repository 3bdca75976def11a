# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The base of an adapter: weights that its checkpoints name, but do not hold.

The manifest of each checkpoint has the path and the hash of the base.
"""

import dataclasses
import hashlib
import logging
import os

from palm_mtf.architecture.parameters import parameter_shapes, saved_shapes
from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.checkpoints.weights_to_load import (
  NamedWeights,
  check_same_model,
  find_initial_weights,
  find_other_function,
  find_weights,
)
from palm_mtf.config import ModelConfig, RunConfig
from palm_mtf.errors import UserError

_logger = logging.getLogger(__name__)


def find_base(
  run: RunConfig, newest: Checkpoint | None, model: ModelConfig
) -> tuple[NamedWeights, NamedWeights | None]:
  """Returns base and initial adapter of INIT_CHECKPOINT, held open.

  If INIT_CHECKPOINT is an adapted run, its adapter is the initial adapter;
  otherwise, there is none. `newest` is the run's newest checkpoint, None if
  there is none.

  Raises UserError if the base is missing, damaged, of another model, or not
  that with which the run began; or if the adapter has other settings.
  """
  given = f"ADAPTER = {model.adapter!r}"
  if run.init_checkpoint is None:
    raise UserError(
      f"{given}: an adapter changes a trained model; name its checkpoint in "
      "INIT_CHECKPOINT."
    )
  for name, only in (("init_state", "weights"), ("init_experts", "none")):
    if (value := getattr(run, name)) != only:
      raise UserError(
        f"{given} and {name.upper()} = {value!r}: an adapter begins with all "
        f'weights of its base, and no more; set {name.upper()} = "{only}".'
      )
  path, adapter = run.init_checkpoint, None
  given_weights = find_weights("INIT_CHECKPOINT", path)
  first = given_weights.checkpoint
  if first and first.manifest.base:
    check_same_model(first, saved_shapes(model))
    if other := find_other_function(first, model):
      raise UserError(
        f"{other[0]}: {first.path} was trained with {other[1]}; begin with the "
        "same, or with its base."
      )
    own = {name: name for name in first.manifest.shapes}
    adapter = dataclasses.replace(given_weights, names=own)
    path = first.manifest.base["checkpoint"]
  shapes = parameter_shapes(model.base)
  found = find_initial_weights(path, None, shapes)
  assert found
  if first and adapter:
    _check_same_base(first, found)
  if newest:
    _check_same_base(newest, found)
  elif (
    not adapter
    and found.checkpoint
    and (other := find_other_function(found.checkpoint, model.base))
  ):
    _logger.warning(
      f"{other[0]}: {found.place} was trained with {other[1]}, so without its "
      "adapter the model is not the base; use that, unless you mean it"
    )
  return found, adapter


def describe_base(weights: NamedWeights) -> dict[str, str]:
  """Returns `base` of the manifests of a run that adapts `weights`."""
  return {
    "kind": "adapted",
    "checkpoint": os.path.abspath(weights.place),
    "blake2b": _hash_of(weights),
  }


def with_base(
  checkpoint: Checkpoint, before: Checkpoint | None = None
) -> Checkpoint:
  """Returns a checkpoint with the files of its base, if any, held open.

  If `before`, an earlier checkpoint of the run, has the same base open, that is
  taken. Raises UserError if the base is missing or changed.
  """
  base = checkpoint.manifest.base
  if not base or checkpoint.base:
    return checkpoint
  if before and before.base and before.manifest.base == base:
    return dataclasses.replace(checkpoint, base=before.base)
  what = f"the base of {checkpoint.path}"
  weights = find_weights(what, base["checkpoint"])
  _check_same_base(checkpoint, weights)
  return dataclasses.replace(checkpoint, base=weights.files)


def _check_same_base(adapter: Checkpoint, weights: NamedWeights) -> None:
  base = adapter.manifest.base or {}
  if base.get("blake2b") != _hash_of(weights):
    raise UserError(
      f"{weights.given}: {weights.place} has other weights than the base of "
      f"{adapter.path}, which was {base.get('checkpoint')} with the hash "
      f"{base.get('blake2b')}; name that, or use another MODEL_DIR."
    )


def _hash_of(weights: NamedWeights) -> str:
  if weights.checkpoint:
    return weights.checkpoint.blake2b
  # TensorFlow's files have no manifest, which would have their hash.
  hashes = "".join(weights.files.hashes())
  return hashlib.blake2b(hashes.encode(), digest_size=16).hexdigest()
