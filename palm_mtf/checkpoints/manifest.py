# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a MODEL_DIR: their manifests, and whether they are whole.

  MODEL_DIR/checkpoints/step_00000200/{manifest.json, weights.*}

writer.py writes checkpoints, tensors.py the tensors in them; this module only
reads files, without TensorFlow.
"""

import dataclasses
import datetime
import json
import logging
import os
from collections.abc import Mapping

from palm_mtf.errors import UserError
from palm_mtf.model_dir.layout import ModelDir, step_of
from palm_mtf.model_dir.sealed import hash_file, read_sealed, sealed

_logger = logging.getLogger(__name__)

WEIGHTS = "weights"
MANIFEST = "manifest.json"
# Key of the manifest's own hash.
_SEAL = "blake2b"
_SHOWN_DIFFERENCES = 3


class DamagedCheckpointError(Exception):
  """A file of a checkpoint is missing, truncated or changed; says which."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """Manifest of a checkpoint: the run behind its weights."""

  shapes: Mapping[str, tuple[int, ...]]  # of every parameter, by name
  vocabulary_sha256: str  # of the SentencePiece model
  # Settings and hashes that decide the batch of a step, and the state of the
  # loss spike detector.
  data: Mapping[str, object]
  settings: Mapping[str, object]  # value of every macro
  versions: Mapping[str, str]  # of palm_mtf, Python and numerical libraries
  step: int = 0  # training steps done
  next_row: int = 0  # row of the training data that the next step begins with
  parent: Mapping[str, str] | None = None  # name and hash of the one before


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A checkpoint on the disk, all of whose files exist."""

  path: str  # of its folder
  manifest: Manifest
  files: Mapping[str, tuple[int, str]]  # bytes and hash, by name
  # Hash of the manifest, which has the hash of every file: it covers them all.
  blake2b: str

  @property
  def prefix(self) -> str:
    """TensorFlow's prefix of its weights."""
    return os.path.join(self.path, WEIGHTS)

  @property
  def as_parent(self) -> dict[str, str]:
    """`parent` of the manifests of its successors."""
    name = os.path.basename(self.path)
    return {"checkpoint": name, "blake2b": self.blake2b}

  @property
  def num_bytes(self) -> int:
    """Size of its files."""
    return sum(size for size, _ in self.files.values())

  @property
  def written(self) -> datetime.datetime:
    """Local time at which it was written."""
    seconds = os.path.getmtime(os.path.join(self.path, MANIFEST))
    return datetime.datetime.fromtimestamp(int(seconds))


def checkpoint_folders(model_dir: str) -> list[str]:
  """Returns the paths of all checkpoints, damaged ones too, by step."""
  root = ModelDir(model_dir).checkpoints
  names = os.listdir(root) if os.path.isdir(root) else []
  steps = {name: step_of(name) for name in names if step_of(name) is not None}
  return [os.path.join(root, name) for name in sorted(steps, key=steps.get)]


def find_checkpoints(model_dir: str) -> list[Checkpoint]:
  """Returns the checkpoints whose files have their sizes, oldest first."""
  # Hashes are left to read_whole: they read every byte.
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
  """Returns the newest checkpoint whose bytes match its hashes, if any.

  Args:
    model_dir: MODEL_DIR, which need not exist.
    setting: name of the setting that `model_dir` was given for.

  Raises:
    UserError: there are checkpoints, and all are damaged.
  """
  paths = checkpoint_folders(model_dir)
  # Hashing reads a checkpoint once; older ones are read only after a damaged
  # one.
  for path in reversed(paths):
    try:
      return read_whole(path)
    except DamagedCheckpointError as error:
      warn_of_damage(path, error)
  # Starting anew would silently discard what was trained.
  if paths:
    raise UserError(
      f"{setting} = {model_dir!r}: none of its {len(paths)} checkpoints is "
      "whole (see above); mend one, or choose another folder."
    )
  return None


def newest_checkpoint(
  model_dir: str, shapes: Mapping[str, tuple[int, ...]]
) -> Checkpoint:
  """Returns the newest whole checkpoint of the model with these `shapes`.

  Raises:
    UserError: there is none, or it is of another model.
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
  """Returns a checkpoint after comparing every file with its hash.

  Raises:
    DamagedCheckpointError: a file is missing, truncated or changed.
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
  """Returns a checkpoint after comparing the sizes of its files.

  Raises:
    DamagedCheckpointError: a file is missing or truncated, or the manifest
      changed.
  """
  try:
    # JSON has no tuples: sizes with hashes, and shapes, were written as lists.
    content, digest = read_sealed(os.path.join(path, MANIFEST), _SEAL)
    files = {
      name: (size, d) for name, (size, d) in content.pop("files").items()
    }
    content["shapes"] = {k: tuple(v) for k, v in content["shapes"].items()}
    manifest = Manifest(**content)
  except OSError as error:
    raise DamagedCheckpointError(f"{MANIFEST}: {error.strerror}") from None
  # Not JSON, not with the hash of its content, or without a field.
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


def write_manifest(folder: str, manifest: Manifest) -> None:
  """Writes manifest.json beside the files in `folder`, with their hashes."""
  files = {}
  for name in sorted(os.listdir(folder)):
    path = os.path.join(folder, name)
    files[name] = os.path.getsize(path), hash_file(path)
  content = sealed({**dataclasses.asdict(manifest), "files": files}, _SEAL)
  with open(os.path.join(folder, MANIFEST), "w", encoding="utf-8") as file:
    json.dump(content, file, indent=1)


def check_same_model(
  checkpoint: Checkpoint,
  shapes: Mapping[str, tuple[int, ...]],
  vocabulary_sha256: str | None = None,
) -> None:
  """Raises UserError if `checkpoint` is of another model or vocabulary.

  Args:
    checkpoint: checkpoint on the disk.
    shapes: shape of every parameter of the model, by name.
    vocabulary_sha256: hash of the run's SentencePiece model; None if unknown.
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


def last_good(newest: Checkpoint | None) -> str:
  """Returns the sentence about the newest checkpoint in messages."""
  if newest:
    return f"The last good checkpoint is {newest.path}."
  return "There is no checkpoint yet."


def shape_differences(
  held: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> str:
  """Returns the names whose shapes differ, as text; "" where all agree."""
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
