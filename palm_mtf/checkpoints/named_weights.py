# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights that the user names by a path, as in INIT_CHECKPOINT.

The path names a checkpoint, a run, or the prefix of a TensorFlow checkpoint.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping

from palm_mtf.checkpoints.manifest import (
  MANIFEST,
  WEIGHTS,
  Checkpoint,
  DamagedCheckpointError,
  OpenWeights,
  newest_whole,
  read_and_hold,
)
from palm_mtf.errors import UserError, suggest_name
from palm_mtf.model_dir.paths import ModelDir, step_of


@dataclasses.dataclass(frozen=True)
class NamedWeights:
  """Weights on the disk that a setting such as INIT_CHECKPOINT names."""

  given: str  # setting and value, for messages: "INIT_CHECKPOINT = 'a'"
  place: str  # path of the checkpoint or prefix, for messages
  files: OpenWeights  # open, because their run's trainer may remove them
  # None if palm_mtf did not write the weights: their vocabulary is unknown.
  checkpoint: Checkpoint | None
  # {parameter: its name in the files}; only `find_initial_weights` sets it.
  names: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def prefix(self) -> str:
    """TensorFlow's prefix, by which to read the open files."""
    return self.files.prefix


def find_weights(setting: str, path: str) -> NamedWeights:
  """Returns the weights at `path`, with their files held open.

  `path`, the value of `setting`, is the folder of a checkpoint or a run, or a
  TensorFlow prefix. The files of a checkpoint are compared with the hashes in
  its manifest; the prefix of another checkpoint has no hashes.

  Raises UserError if there are no weights, or the weights are damaged.
  """
  given = f"{setting} = {path!r}"
  path = os.path.expanduser(path).rstrip("/")
  # The prefix of a checkpoint that has a manifest is that checkpoint.
  folder, stem = os.path.split(path.removesuffix(".index"))
  if stem == WEIGHTS and os.path.exists(os.path.join(folder, MANIFEST)):
    path = folder
  # `path` is a checkpoint, such as runs/first/checkpoints/step_00000200.
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

  Raises UserError if TensorFlow cannot read a file, or if a variable is not
  float32.
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
  """Turns TensorFlow's errors in the `with` body into UserErrors."""
  from palm_mtf._tf import tf

  try:
    yield
  # TensorFlow raises IndexError if a file is truncated.
  except (tf.errors.OpError, ValueError, RuntimeError, IndexError) as error:
    reason = str(error).splitlines()[0]
    raise UserError(
      f"{weights.given}: TensorFlow cannot read it: {reason}"
    ) from None
