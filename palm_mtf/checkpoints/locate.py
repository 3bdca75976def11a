# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Paths of weights: a checkpoint, a run, or a TensorFlow checkpoint prefix."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping

from palm_mtf.checkpoints.manifest import (
  MANIFEST,
  Checkpoint,
  DamagedCheckpointError,
  newest_whole,
  read_and_hold,
)
from palm_mtf.checkpoints.open_weights import OpenWeights
from palm_mtf.errors import UserError, did_you_mean
from palm_mtf.model_dir.layout import ModelDir, step_of


@dataclasses.dataclass(frozen=True)
class NamedWeights:
  """Weights on the disk."""

  given: str  # by the user, for messages: "INIT_CHECKPOINT = 'a'"
  place: str  # path, for messages
  files: OpenWeights  # which a trainer of that run may remove meanwhile
  # None for TensorFlow's own, whose vocabulary is unknown.
  checkpoint: Checkpoint | None

  @property
  def prefix(self) -> str:
    """TensorFlow's name of the files."""
    return self.files.prefix


def find_weights(setting: str, path: str) -> NamedWeights:
  """Returns the weights at `path`, every hash compared.

  Args:
    setting: name of the setting that `path` was given for, for messages.
    path: folder of a checkpoint or a run, or a TensorFlow prefix.

  Raises:
    UserError: there are none, or they are damaged.
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
    UserError: TensorFlow cannot read it, or a variable is not float32.
  """
  # TensorFlow takes seconds to import, and only this function needs it.
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
  # IndexError is that of a file cut short.
  except (tf.errors.OpError, ValueError, RuntimeError, IndexError) as error:
    reason = str(error).splitlines()[0]
    raise UserError(
      f"{weights.given}: TensorFlow cannot read it: {reason}"
    ) from None
