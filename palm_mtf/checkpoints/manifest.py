# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a MODEL_DIR: their manifests, and whether they are whole.

  MODEL_DIR/checkpoints/step_00000200/{manifest.json, weights.*}

writer.py writes checkpoints, tensors.py the tensors in them; this module only
reads files, without TensorFlow.
"""

import contextlib
import dataclasses
import datetime
import json
import logging
import operator
import os
from collections.abc import Iterator, Mapping, Sequence

from palm_mtf.checkpoints.open_weights import OpenWeights
from palm_mtf.errors import UserError
from palm_mtf.model_dir.layout import ModelDir, step_of
from palm_mtf.model_dir.sealed import hash_file, read_sealed, sealed

_logger = logging.getLogger(__name__)

WEIGHTS = "weights"
MANIFEST = "manifest.json"
# Key of the manifest's own hash.
_SEAL = "blake2b"


class DamagedCheckpointError(Exception):
  """A file of a checkpoint is missing, truncated or changed; says which."""


class RemovedCheckpointError(DamagedCheckpointError):
  """A checkpoint was removed while it was read; it was not damaged."""


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
  # Its files, where they are to stay readable: a trainer may remove them.
  held: OpenWeights | None = dataclasses.field(
    default=None, compare=False, repr=False
  )

  @property
  def prefix(self) -> str:
    """TensorFlow's prefix of its weights."""
    return self.held.prefix if self.held else os.path.join(self.path, WEIGHTS)

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
    except RemovedCheckpointError:
      continue
    except DamagedCheckpointError as error:
      warn_of_damage(path, error)
  return found


def newest_whole(
  model_dir: str, setting: str = "MODEL_DIR", *, hold: bool = False
) -> Checkpoint | None:
  """Returns the newest checkpoint whose bytes match its hashes, if any.

  Args:
    model_dir: MODEL_DIR, which need not exist.
    setting: name of the setting that `model_dir` was given for.
    hold: hold its files, for a reader beside a trainer.

  Raises:
    UserError: there are checkpoints, and all are damaged, or one cannot be
      read.
  """
  while True:
    paths = checkpoint_folders(model_dir)
    with contextlib.suppress(RemovedCheckpointError):
      return first_whole(paths[::-1], f"{setting} = {model_dir!r}", hold=hold)


def first_whole(
  paths: Sequence[str], given: str, *, hold: bool = False
) -> Checkpoint | None:
  """Returns the first of some checkpoints that is whole, None of none.

  Args:
    paths: paths of checkpoints, in the order to try.
    given: setting and value of their folder, for messages.
    hold: hold the files of the one that is returned.

  Raises:
    UserError: all are damaged, or one cannot be read.
    RemovedCheckpointError: one has gone.
  """
  # Hashing reads a checkpoint once; others are read only after a damaged one.
  for path in paths:
    try:
      return read_whole(path, hold=hold)
    except RemovedCheckpointError:
      raise
    except DamagedCheckpointError as error:
      warn_of_damage(path, error)
  # Starting anew would silently discard what was trained.
  if paths:
    raise UserError(
      f"{given}: none of its {len(paths)} checkpoints is whole (see above); "
      "mend one, or choose another folder."
    )
  return None


def warn_of_damage(path: str, error: DamagedCheckpointError) -> None:
  """Logs a warning that a checkpoint is damaged, and how."""
  _logger.warning(f"DAMAGED checkpoint {path}: {error}; it is not used")


def read_whole(path: str, *, hold: bool = False) -> Checkpoint:
  """Returns a checkpoint after comparing every file with its hash.

  Args:
    path: folder of the checkpoint.
    hold: hold the files that were compared.

  Raises:
    DamagedCheckpointError: a file is missing, truncated or changed.
    UserError: a file cannot be read, or another version wrote it.
  """
  checkpoint = read_checkpoint(path)
  if hold:
    with _reading(path, WEIGHTS):
      held = OpenWeights(checkpoint.prefix)
    checkpoint = dataclasses.replace(checkpoint, held=held)
  for name, (_, expected) in checkpoint.files.items():
    with _reading(path, name):
      file = held.path(name) if hold else os.path.join(path, name)
      digest = hash_file(file)
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
    UserError: a file cannot be read, or another version wrote it.
  """
  try:
    with _reading(path, MANIFEST):
      content, digest = read_sealed(os.path.join(path, MANIFEST), _SEAL)
  except UserError:
    raise
  except ValueError:  # not JSON, or not with the hash of its content
    raise DamagedCheckpointError(
      f"{MANIFEST} does not say what was written"
    ) from None
  try:
    # JSON has no tuples: sizes with hashes, and shapes, were written as lists.
    files = {
      name: (operator.index(size), d)
      for name, (size, d) in content.pop("files").items()
    }
    content["shapes"] = {
      k: tuple(map(operator.index, v)) for k, v in content["shapes"].items()
    }
    manifest = Manifest(**content)
  except (ValueError, TypeError, KeyError, AttributeError):
    # The hash is right: this is what was written, with other fields.
    raise UserError(
      f"{path} is of another version of palm_mtf, which alone can read it; use "
      "that version, or move the folder away."
    ) from None
  for name, (size, _) in files.items():
    with _reading(path, name):
      actual = os.path.getsize(os.path.join(path, name))
    if actual != size:
      raise DamagedCheckpointError(f"{name} has {actual:,} of {size:,} bytes")
  return Checkpoint(path, manifest, files, digest)


@contextlib.contextmanager
def _reading(folder: str, name: str) -> Iterator[None]:
  """Tells a missing file of a checkpoint from one that cannot be read now."""
  try:
    yield
  except OSError as error:
    what = f"{name}: {error.strerror}"
    if _is_gone(folder):
      raise RemovedCheckpointError(what) from None
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
      raise DamagedCheckpointError(what) from None
    # Rights, a file system that does not answer: the file may be whole.
    raise UserError(
      f"cannot read {os.path.join(folder, name)}: {error.strerror}; mend that, "
      f"or move {folder} away."
    ) from None


def _is_gone(path: str) -> bool:
  try:
    os.lstat(path)
  except FileNotFoundError:
    return True
  except OSError:
    return False
  return False


def write_manifest(folder: str, manifest: Manifest) -> None:
  """Writes manifest.json beside the files in `folder`, with their hashes."""
  files = {}
  for name in sorted(os.listdir(folder)):
    path = os.path.join(folder, name)
    files[name] = os.path.getsize(path), hash_file(path)
  content = sealed({**dataclasses.asdict(manifest), "files": files}, _SEAL)
  with open(os.path.join(folder, MANIFEST), "w", encoding="utf-8") as file:
    json.dump(content, file, indent=1)


def last_good(newest: Checkpoint | None) -> str:
  """Returns the sentence about the newest checkpoint in messages."""
  if newest:
    return f"The last good checkpoint is {newest.path}."
  return "There is no checkpoint yet."
