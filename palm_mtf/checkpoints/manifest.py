# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a MODEL_DIR: which are whole, and whose they are.

  MODEL_DIR/checkpoints/step_00000200/{manifest.json, weights.*}

A checkpoint is a folder that appears under its name when all of it is written.
Its manifest says what it holds, with a hash of every file and of itself, so
that damage is found before anything is trained on it, and another model is
refused before TensorFlow is imported. writer.py writes them, and
tensors.py the tensors in them; this module only reads files.
"""

import dataclasses
import datetime
import logging
import os
from collections.abc import Mapping

from palm_mtf.errors import UserError
from palm_mtf.model_dir.layout import ModelDir, step_of
from palm_mtf.model_dir.sealed import hash_file, read_sealed, sealed

_logger = logging.getLogger(__name__)

WEIGHTS = "weights"
MANIFEST = "manifest.json"
_SEAL = "blake2b"
_SHOWN_DIFFERENCES = 3


class DamagedCheckpointError(Exception):
  """A file of a checkpoint is missing, cut short or changed; says which."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """What a checkpoint holds.

  Attributes:
    shapes: shape of every parameter, by its name.
    vocabulary_sha256: hash of the SentencePiece model.
    data: what the batch of a step depends on: SEED, GLOBAL_BATCH_SIZE,
      SEQUENCE_LENGTH, a hash of the tokens, and what training/loss_spikes.py
      keeps.
    settings: every macro of the run and its value.
    versions: versions of palm_mtf, Python and the libraries that compute.
    step: training steps done.
    next_row: the row of training data that the next step begins with.
    parent: name of the checkpoint it was trained from, and its `blake2b`; None
      for the first.
  """

  shapes: Mapping[str, tuple[int, ...]]
  vocabulary_sha256: str
  data: Mapping[str, object]
  settings: Mapping[str, object]
  versions: Mapping[str, str]
  step: int = 0
  next_row: int = 0
  parent: Mapping[str, str] | None = None


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A checkpoint whose files are all there.

  Attributes:
    path: path of its folder.
    manifest: what it holds.
    files: name -> [bytes, hash] of every file but the manifest.
    blake2b: hash of the manifest, and so of all it holds.
  """

  path: str
  manifest: Manifest
  files: Mapping[str, tuple[int, str]]
  blake2b: str

  @property
  def prefix(self) -> str:
    """What TensorFlow calls the checkpoint's path."""
    return os.path.join(self.path, WEIGHTS)

  @property
  def as_parent(self) -> dict[str, str]:
    """What the manifests of its successors call it."""
    name = os.path.basename(self.path)
    return {"checkpoint": name, "blake2b": self.blake2b}

  @property
  def num_bytes(self) -> int:
    """Size of its files."""
    return sum(size for size, _ in self.files.values())

  @property
  def written(self) -> datetime.datetime:
    """When it was written, local time."""
    seconds = os.path.getmtime(os.path.join(self.path, MANIFEST))
    return datetime.datetime.fromtimestamp(int(seconds))


def checkpoint_folders(model_dir: str) -> list[str]:
  """Returns the paths of all checkpoints, whole or not, by their steps."""
  root = ModelDir(model_dir).checkpoints
  names = os.listdir(root) if os.path.isdir(root) else []
  steps = {name: step_of(name) for name in names if step_of(name) is not None}
  return [os.path.join(root, name) for name in sorted(steps, key=steps.get)]


def find_checkpoints(model_dir: str) -> list[Checkpoint]:
  """Returns the checkpoints whose files have their sizes, oldest first.

  Their bytes are not compared: see `newest_whole`. Warns of every folder that
  is damaged. `model_dir` need not exist.
  """
  found = []
  for path in checkpoint_folders(model_dir):
    try:
      found.append(read_checkpoint(path))
    except DamagedCheckpointError as error:
      warn_of_damage(path, error)
  return found


def newest_whole(
  model_dir: str, setting: str = "MODEL_DIR"
) -> Checkpoint | None:
  """Returns the newest checkpoint all of whose bytes are as they were written.

  Warns of every newer one that is damaged. `model_dir` need not exist;
  `setting` is what it was given for.

  Raises:
    UserError: there are checkpoints, and none is whole.
  """
  paths = checkpoint_folders(model_dir)
  for path in reversed(paths):
    try:
      return read_whole(path)
    except DamagedCheckpointError as error:
      warn_of_damage(path, error)
  if paths:
    raise UserError(
      f"{setting} = {model_dir!r}: none of its {len(paths)} checkpoints is "
      "whole (see above); mend one, or choose another folder."
    )
  return None


def newest_checkpoint(
  model_dir: str, shapes: Mapping[str, tuple[int, ...]]
) -> Checkpoint:
  """Returns the newest whole checkpoint, for whoever cannot do without one.

  Raises:
    UserError: there is none, or it is of another model than `shapes`.
  """
  newest = newest_whole(model_dir)
  if not newest:
    raise UserError(
      f"MODEL_DIR = {model_dir!r}: holds no checkpoint; train one there with "
      "palm_mtf train, or give the folder of a run."
    )
  check_same_model(newest, shapes)
  return newest


def warn_of_damage(path: str, error: DamagedCheckpointError) -> None:
  """Logs a warning that a checkpoint is damaged, and how."""
  _logger.warning(f"DAMAGED checkpoint {path}: {error}; it is not used")


def read_whole(path: str) -> Checkpoint:
  """Reads a checkpoint's manifest and compares every byte with its hashes.

  Raises:
    DamagedCheckpointError: a file is missing, cut short or changed.
  """
  checkpoint = read_checkpoint(path)
  for name, (_, expected) in checkpoint.files.items():
    try:
      digest = hash_file(os.path.join(path, name))
    except OSError as error:
      raise DamagedCheckpointError(f"{name}: {error.strerror}") from None
    if digest != expected:
      raise DamagedCheckpointError(
        f"{name} does not hold the bytes that were written"
      )
  return checkpoint


def read_checkpoint(path: str) -> Checkpoint:
  """Reads a checkpoint's manifest and compares the sizes of its files.

  Raises:
    DamagedCheckpointError: a file is missing or cut short, or the manifest is
      changed.
  """
  try:
    content, digest = read_sealed(os.path.join(path, MANIFEST), _SEAL)
    files = {
      name: (size, d) for name, (size, d) in content.pop("files").items()
    }
    content["shapes"] = {k: tuple(v) for k, v in content["shapes"].items()}
    manifest = Manifest(**content)
  except OSError as error:
    raise DamagedCheckpointError(f"{MANIFEST}: {error.strerror}") from None
  except (ValueError, TypeError, KeyError, AttributeError):
    raise DamagedCheckpointError(
      f"{MANIFEST} does not say what was written"
    ) from None
  for name, (size, _) in files.items():
    try:
      actual = os.path.getsize(os.path.join(path, name))
    except OSError as error:
      raise DamagedCheckpointError(f"{name}: {error.strerror}") from None
    if actual != size:
      raise DamagedCheckpointError(f"{name} has {actual:,} of {size:,} bytes")
  return Checkpoint(path, manifest, files, digest)


def describe_files(folder: str) -> dict[str, tuple[int, str]]:
  """Returns the size and the hash of every file in `folder`, by its name."""
  paths = {name: os.path.join(folder, name) for name in os.listdir(folder)}
  return {
    name: (os.path.getsize(paths[name]), hash_file(paths[name]))
    for name in sorted(paths)
  }


def sealed_content(
  manifest: Manifest, files: Mapping[str, tuple[int, str]]
) -> dict[str, object]:
  """Returns what manifest.json holds, with a hash of itself as "blake2b"."""
  return sealed({**dataclasses.asdict(manifest), "files": files}, _SEAL)


def check_same_model(
  checkpoint: Checkpoint,
  shapes: Mapping[str, tuple[int, ...]],
  vocabulary_sha256: str | None = None,
) -> None:
  """Raises UserError if `checkpoint` is of another model or vocabulary."""
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
  """Returns which names have other shapes, as text; "" where none has."""
  different = [
    f"{name} {_shape_text(held.get(name))}, the model wants "
    f"{_shape_text(wanted.get(name))}"
    for name in dict.fromkeys([*wanted, *held])
    if held.get(name) != wanted.get(name)
  ]
  text = "; ".join(different[:_SHOWN_DIFFERENCES])
  more = len(different) - _SHOWN_DIFFERENCES
  return f"{text}; and {more} more" if more > 0 else text


def _shape_text(shape: tuple[int, ...] | None) -> str:
  return "nothing" if shape is None else str(list(shape))
