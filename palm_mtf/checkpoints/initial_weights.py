# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds weights by a path that the user gives, such as INIT_CHECKPOINT.

The path names a checkpoint, a run, or the prefix of a TensorFlow checkpoint.

INIT_STATE = "weights"   only parameters, for finetuning (PaLM 6): step and
                         optimizer start from scratch
INIT_STATE = "all"       everything, to train on other data (PaLM Appendix F)
"""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping

from palm_mtf.accounting.optimizer_state import check_same_slots
from palm_mtf.checkpoints.manifest import (
  MANIFEST,
  Checkpoint,
  DamagedCheckpointError,
  newest_whole,
  read_and_hold,
)
from palm_mtf.checkpoints.same_model import shape_differences
from palm_mtf.checkpoints.weight_files import OpenWeights
from palm_mtf.config import AdafactorConfig, DataConfig, RunConfig
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError, suggest_name
from palm_mtf.model_dir.paths import ModelDir, step_of

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class NamedWeights:
  """Weights on the disk that a setting names, with their files open."""

  given: str  # setting and value, for messages: "INIT_CHECKPOINT = 'a'"
  place: str  # path, for messages
  files: OpenWeights  # open, because their run's trainer may remove them
  # None if palm_mtf did not write the weights: their vocabulary is unknown.
  checkpoint: Checkpoint | None

  @property
  def prefix(self) -> str:
    """TensorFlow's prefix of the files."""
    return self.files.prefix


def find_weights(setting: str, path: str) -> NamedWeights:
  """Returns the weights at `path`, after comparing each file with its hash.

  `path`, the value of `setting`, is the folder of a checkpoint or a run, or a
  TensorFlow prefix.

  Raises:
    UserError: there are no weights, or the weights are damaged.
  """
  given = f"{setting} = {path!r}"
  path = os.path.expanduser(path).rstrip("/")
  # `path` is a checkpoint, such as runs/first/checkpoints/step_00000200, or a
  # copy of one.
  if step_of(path) is not None or os.path.exists(os.path.join(path, MANIFEST)):
    if os.path.isdir(path):
      try:
        checkpoint = read_and_hold(path)
      except DamagedCheckpointError as error:
        raise UserError(
          f"{given}: is damaged: {error}; give another."
        ) from None
      return NamedWeights(given, path, checkpoint.held, checkpoint)
  # `path` is a run, such as runs/first: take its newest whole checkpoint.
  elif os.path.isdir(ModelDir(path).checkpoints):
    newest = newest_whole(path, setting, read=read_and_hold)
    if newest:
      return NamedWeights(given, newest.path, newest.held, newest)
  # `path` is a TensorFlow prefix, such as any/where/model.ckpt-200. Accept the
  # suffix ".index" too, because a shell's completion may add it.
  else:
    prefix = path.removesuffix(".index")
    if os.path.isfile(f"{prefix}.index"):
      try:
        return NamedWeights(given, prefix, OpenWeights(prefix), None)
      except OSError as error:
        raise UserError(
          f"{given}: cannot read {error.filename}: {error.strerror}; give "
          "another."
        ) from None
  raise UserError(
    f"{given}: there is no checkpoint{suggest_name(path)}; give the "
    "folder of a checkpoint or of a run, or what TensorFlow calls a "
    "checkpoint's prefix."
  )


def read_shapes(weights: NamedWeights) -> Mapping[str, tuple[int, ...]]:
  """Returns the shape of every variable in the checkpoint, by name.

  Raises:
    UserError: TensorFlow cannot read a file, or a variable is not float32.
  """
  # Import TensorFlow here: it takes seconds, and few commands read shapes.
  from palm_mtf._tf import tf

  with reading(weights):
    reader = tf.train.load_checkpoint(weights.prefix)
  # Parameters are float32, and TensorFlow converts no dtypes on restoring.
  for name, dtype in reader.get_variable_to_dtype_map().items():
    if dtype != tf.float32:
      raise UserError(
        f"{weights.given}: its {name} is {dtype.name}; weights are float32."
      )
  return {k: tuple(v) for k, v in reader.get_variable_to_shape_map().items()}


@contextlib.contextmanager
def reading(weights: NamedWeights) -> Iterator[None]:
  """Turns TensorFlow's errors into UserError while the body reads weights."""
  from palm_mtf._tf import tf

  try:
    yield
  # TensorFlow raises IndexError if a file is truncated.
  except (tf.errors.OpError, ValueError, RuntimeError, IndexError) as error:
    reason = str(error).splitlines()[0]
    raise UserError(
      f"{weights.given}: TensorFlow cannot read it: {reason}"
    ) from None


def find_initial_weights(
  path: str | None,
  newest: Checkpoint | None,
  shapes: Mapping[str, tuple[int, ...]],
) -> NamedWeights | None:
  """Returns the weights that INIT_CHECKPOINT names, or None if it is not used.

  `newest`, this run's newest checkpoint, takes precedence over `path`.

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
  # If the weights are unusable, raise an error, so that a run for which weights
  # were given never starts from random weights.
  weights = find_weights("INIT_CHECKPOINT", path)
  if weights.checkpoint:
    held = weights.checkpoint.manifest.shapes
  else:
    # A checkpoint that palm_mtf did not write has no manifest. Leave out its
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


def find_initial_state(
  weights: NamedWeights, run: RunConfig, optimizer: AdafactorConfig
) -> Checkpoint:
  """Returns another run's checkpoint, from which this run is to resume.

  Raises:
    UserError: palm_mtf did not write the checkpoint, its optimizer state does
      not fit `optimizer`, or its step is TRAIN_STEPS or later.
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
      f"TRAIN_STEPS = {run.train_steps}: {weights.given} already has {step} "
      "steps, which count; give more."
    )
  # Leave out the recorded loss spikes, which name batches of the other run.
  data = {k: v for k, v in found.manifest.data.items() if k != "spikes"}
  manifest = dataclasses.replace(found.manifest, data=data)
  return dataclasses.replace(found, manifest=manifest)


def check_vocabulary_given(
  weights: NamedWeights | None, model_dir: str, data: DataConfig
) -> None:
  """Raises UserError if a run with initial weights would train a vocabulary."""
  # Row i of the initial embedding belongs to token id i of the vocabulary with
  # which the weights were trained. A new vocabulary has other ids.
  own = ModelDir(model_dir).vocabulary
  if not weights or data.vocabulary is not None or os.path.exists(own):
    return
  hint = ""
  if weights.checkpoint:
    # The path is <run>/checkpoints/step_00000200.
    run = os.path.dirname(os.path.dirname(weights.checkpoint.path))
    theirs = weights.checkpoint.manifest.settings.get("VOCABULARY")
    theirs = theirs or ModelDir(run).vocabulary
    hint = f", such as {theirs!r}" if os.path.exists(theirs) else ""
  raise UserError(
    f"VOCABULARY = None: {weights.given} was trained with another vocabulary; "
    f"name that vocabulary in VOCABULARY{hint}."
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
      "make sure that VOCABULARY names it"
    )
  elif weights.checkpoint.manifest.vocabulary_sha256 != vocabulary.sha256:
    raise UserError(
      f"{weights.given}: {weights.place} was trained with another vocabulary "
      "than VOCABULARY; its tokens would mean other texts; set VOCABULARY and "
      "EXTRA_IDS as in its training."
    )
