# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights that the user names by a path, and INIT_CHECKPOINT.

The path names a checkpoint, a run, or a TensorFlow checkpoint's prefix.

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
from palm_mtf.errors import UserError, did_you_mean
from palm_mtf.model_dir.paths import ModelDir, step_of

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class NamedWeights:
  """Weights on the disk."""

  given: str  # by the user, for messages: "INIT_CHECKPOINT = 'a'"
  place: str  # path, for messages
  files: OpenWeights  # open, because their run's trainer may remove them
  # None for a TensorFlow checkpoint, whose vocabulary is unknown.
  checkpoint: Checkpoint | None

  @property
  def prefix(self) -> str:
    """TensorFlow's name of the files."""
    return self.files.prefix


def find_weights(setting: str, path: str) -> NamedWeights:
  """Returns the weights at `path`, after comparing every hash.

  Args:
    setting: name of the setting that `path` was given for, for messages.
    path: folder of a checkpoint or a run, or a TensorFlow prefix.

  Raises:
    UserError: there are no weights, or the weights are damaged.
  """
  given = f"{setting} = {path!r}"
  path = os.path.expanduser(path).rstrip("/")
  # runs/first/checkpoints/step_00000200, or a copy of it by another name
  if step_of(path) is not None or os.path.exists(os.path.join(path, MANIFEST)):
    if os.path.isdir(path):
      try:
        checkpoint = read_and_hold(path)
      except DamagedCheckpointError as error:
        raise UserError(
          f"{given}: is damaged: {error}; give another."
        ) from None
      return NamedWeights(given, path, checkpoint.held, checkpoint)
  # runs/first: its newest whole checkpoint
  elif os.path.isdir(ModelDir(path).checkpoints):
    newest = newest_whole(path, setting, read=read_and_hold)
    if newest:
      return NamedWeights(given, newest.path, newest.held, newest)
  # any/where/model.ckpt-200, or the .index file that a shell completes it to
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
  folder, name = os.path.split(path)
  names = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
  raise UserError(
    f"{given}: there is no checkpoint{did_you_mean(name, names)}; give the "
    "folder of a checkpoint or of a run, or what TensorFlow calls a "
    "checkpoint's prefix."
  )


def read_shapes(weights: NamedWeights) -> Mapping[str, tuple[int, ...]]:
  """Returns the shape of every variable in the file, by name.

  Raises:
    UserError: TensorFlow cannot read the file, or a variable is not float32.
  """
  # TensorFlow takes seconds to import, and few commands come here.
  from palm_mtf._tf import tf

  with reading(weights):
    reader = tf.train.load_checkpoint(weights.prefix)
  # Weights of bfloat16 or integers would be restored into float32 variables.
  for name, dtype in reader.get_variable_to_dtype_map().items():
    if dtype != tf.float32:
      raise UserError(
        f"{weights.given}: its {name} is {dtype.name}; weights are float32."
      )
  return {k: tuple(v) for k, v in reader.get_variable_to_shape_map().items()}


@contextlib.contextmanager
def reading(weights: NamedWeights) -> Iterator[None]:
  """Raises UserError in place of TensorFlow's errors of reading weights."""
  from palm_mtf._tf import tf

  try:
    yield
  # TensorFlow raises IndexError for a truncated file.
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


def find_initial_state(
  weights: NamedWeights, run: RunConfig, optimizer: AdafactorConfig
) -> Checkpoint:
  """Returns the checkpoint from which a run resumes as if it were its own.

  Args:
    weights: weights that INIT_CHECKPOINT names.
    run: settings of the run.
    optimizer: optimizer settings of the run.

  Raises:
    UserError: the checkpoint has no optimizer state, has the state of other
      settings, or has as many steps as the run.
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
  # Loss spikes were skipped in the batches of that run, not in this run's.
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
