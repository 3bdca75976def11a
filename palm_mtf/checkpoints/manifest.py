# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a MODEL_DIR: their manifests, and whether they are whole.

  MODEL_DIR/checkpoints/step_00000200/{manifest.json, weights.*}

writer.py writes checkpoints, variables.py their tensors. This module needs no
TensorFlow. A client calls the functions that are marked @host_function in the
server that has the files. TensorFlow passes strings to them as bytes in UTF-8.
"""

import contextlib
import dataclasses
import fcntl
import functools
import glob
import logging
import operator
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from palm_mtf.checkpoints.known_hashes import hash_unless_known
from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.atomic_files import sync
from palm_mtf.model_dir.foreign_files import (
  check_regular,
  hash_file,
  read_sealed,
  seal,
)
from palm_mtf.model_dir.paths import ModelDir, step_of
from palm_mtf.runtime.host_functions import host_function

_FILE_NAME = re.compile(r"[\w.-]+", re.ASCII)  # of a file in a checkpoint
_OPEN_FILES = "/dev/fd"  # /dev/fd/3 is a path to this process's open file 3
_LINKS = "palm_mtf_links_"  # start of the names of folders with links to files


class OpenWeights:
  """Holds the files of a TensorFlow checkpoint prefix open.

  A trainer may remove a checkpoint while another process reads it. Open files
  stay readable until `close` is called or the object is deleted.

  TensorFlow finds files by their prefix, so a temporary folder holds links to
  the open files. The folder's name has no special characters, because
  TensorFlow reads a prefix as a pattern, in which "[" begins a set of
  characters.
  """

  def __init__(self, prefix: str):
    """Opens the files "PREFIX.*"; raises OSError if a file is not regular."""
    folder, stem = os.path.split(prefix)
    with contextlib.ExitStack() as stack:
      self._paths = {}
      for name in os.listdir(folder or "."):
        if name.startswith(f"{stem}."):
          path = os.path.join(folder, name)
          check_regular(path)
          descriptor = os.open(path, os.O_RDONLY)
          stack.callback(os.close, descriptor)
          self._paths[name] = f"{_OPEN_FILES}/{descriptor}"
      self.prefix = prefix
      with contextlib.suppress(OSError):
        links = stack.enter_context(_folder_of_links())
        for name, path in self._paths.items():
          os.symlink(path, os.path.join(links, name))
        self.prefix = os.path.join(links, stem)
      # Closes the files and removes the folder, at the latest at Python's exit.
      self.close = weakref.finalize(self, stack.pop_all().close)

  def path(self, name: str) -> str:
    """Returns a path to the open file `name`, or raises FileNotFoundError."""
    if name not in self._paths:
      raise FileNotFoundError(2, "No such file or directory", name)
    return self._paths[name]

  def hashes(self) -> list[str]:
    """Returns the hash of each file, in the order of the files' names."""
    return [hash_file(self._paths[name]) for name in sorted(self._paths)]


@contextlib.contextmanager
def _folder_of_links() -> Iterator[str]:
  """Yields a temporary folder, locked so that no other process removes it."""
  _remove_abandoned_folders()
  with tempfile.TemporaryDirectory(prefix=_LINKS) as folder:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
      # The kernel releases the lock when this process ends, even if it is
      # killed. If the file system has no locks, no process removes the folder.
      with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH)
      yield folder
    finally:
      os.close(descriptor)


def _remove_abandoned_folders() -> None:
  """Removes the folders that killed processes of this user have left."""
  within = glob.escape(tempfile.gettempdir())
  for path in glob.glob(os.path.join(within, f"{_LINKS}*")):
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
      descriptor = os.open(path, os.O_DIRECTORY | os.O_NOFOLLOW)
      stack.callback(os.close, descriptor)
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
      if os.fstat(descriptor).st_uid == os.getuid():
        shutil.rmtree(path)


# {prefix of a checkpoint: its files, which this process holds for a client}
_open: dict[bytes, OpenWeights] = {}


@host_function
def make_empty_file(path: bytes) -> np.int32:
  """Makes a file; returns errno, 0 on success.

  A client that finds the file knows that it shares the folder with the server.
  """
  try:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
  except OSError as error:
    return np.int32(error.errno)
  return np.int32(0)


@host_function
def seal_file(path: bytes) -> tuple[np.int64, bytes, np.int32]:
  """Flushes a file to the disk; returns size in bytes, hash, and errno or 0.

  The checkpoint's manifest records size and hash, to reveal later damage.
  """
  try:
    sync(path.decode())
    digest = hash_file(path.decode()).encode()
    return np.int64(os.path.getsize(path)), digest, np.int32(0)
  except OSError as error:
    return np.int64(0), b"", np.int32(error.errno)


@host_function
def open_weights(
  prefix: bytes, names: Sequence[bytes]
) -> tuple[np.ndarray, np.int32]:
  """Holds files open in this process until `close_weights`; hashes some.

  Args:
    prefix: TensorFlow's prefix of the files.
    names: names of the files to hash.

  Returns:
    The hashes, [len(names)] bytes, and errno, 0 on success.
  """
  try:
    files = _open[prefix] = OpenWeights(prefix.decode())
    hashes = [hash_file(files.path(x.decode())).encode() for x in names]
    return np.array(hashes, object), np.int32(0)
  except OSError as error:
    return np.array([b""] * len(names), object), np.int32(error.errno)


@host_function
def find_opened_prefix(prefix: bytes) -> bytes:
  """Returns a TensorFlow prefix of links to the open files of `prefix`.

  The links outlive the files' names, which a trainer may remove meanwhile.
  Returns `prefix` itself if no links could be made.
  """
  return _open[prefix].prefix.encode()


@host_function
def close_weights(prefix: bytes) -> np.int32:
  """Closes the files that `open_weights` opened by `prefix`; returns 0."""
  if files := _open.pop(prefix, None):
    files.close()
  return np.int32(0)


_logger = logging.getLogger(__name__)

WEIGHTS = "weights"  # TensorFlow's prefix of the files in a checkpoint's folder
MANIFEST = "manifest.json"
# The manifest's key for the hash of its other keys, which reveals damage.
_SEAL = "blake2b"

FileSeal = tuple[int, str]  # a file's size in bytes, and its hash
# Writes weights to the files of a TensorFlow prefix. Returns {file name: seal}
# of the files that it has hashed; `write_manifest` hashes the other files.
WriteWeights = Callable[[str], Mapping[str, FileSeal]]


class DamagedCheckpointError(Exception):
  """A file of a checkpoint, named in the message, is missing or damaged."""


class RemovedCheckpointError(DamagedCheckpointError):
  """A checkpoint was removed while it was read, so nobody is warned."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """A checkpoint's description of its weights and of the run that made them."""

  shapes: Mapping[str, tuple[int, ...]]  # shape of every parameter, by name
  vocabulary_sha256: str  # the weights fit only this vocabulary
  # The settings and hashes that decide which batch each step trains on, and the
  # state of the loss spike detector.
  data: Mapping[str, object]
  settings: Mapping[str, object]  # {macro: value} of the settings for training
  versions: Mapping[str, str]  # of palm_mtf, Python and numerical libraries
  # Versions and settings of the kernels that computed the steps; a run that
  # resumes with others warns. {} if an earlier version wrote the manifest.
  kernels: Mapping[str, str] = dataclasses.field(default_factory=dict)
  step: int = 0  # training steps done
  next_row: int = 0  # first row of training data that the next step reads
  # Name and hash (`Checkpoint.as_parent`) of the checkpoint from which training
  # continued, of this run or of another run; None if there is none.
  parent: Mapping[str, str] | None = None
  # If the weights are an adapter: how they came from a base ("adapted"), and
  # the path and hash of the base (checkpoints/adapter_base.py).
  base: Mapping[str, str] | None = None
  # Path and hash of the run's teacher (checkpoints/teacher.py), if it has one.
  teacher: Mapping[str, str] | None = None
  # How the run began, and with which weights (checkpoints/lineage.py). None if
  # an earlier version began the run, or if it began only with `base`.
  origin: Mapping[str, object] | None = None


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A checkpoint on the disk whose files exist and have the right sizes."""

  path: str  # the folder of the checkpoint
  manifest: Manifest
  files: Mapping[str, FileSeal]  # by file name, without the manifest
  # Hash of the manifest, which has all files' hashes; identifies the weights.
  blake2b: str
  # Whether every file was compared with its hash; if not, the training session
  # compares the files before it restores them.
  is_verified: bool = dataclasses.field(default=False, compare=False)
  # The weights' files if they are held open, because a trainer may remove the
  # checkpoint while it is read; otherwise None.
  held: OpenWeights | None = dataclasses.field(
    default=None, compare=False, repr=False
  )
  # The files of an adapter's base; None without a base, or if not opened.
  base: OpenWeights | None = dataclasses.field(
    default=None, compare=False, repr=False
  )

  @property
  def prefix(self) -> str:
    """TensorFlow's prefix of the weights' files."""
    return self.held.prefix if self.held else os.path.join(self.path, WEIGHTS)

  @property
  def as_parent(self) -> dict[str, str]:
    """Value of `parent` in the manifest of the next checkpoint."""
    name = os.path.basename(self.path)
    return {"checkpoint": name, "blake2b": self.blake2b}


# Reads the checkpoint in a folder; DamagedCheckpointError unless it is whole.
ReadCheckpoint = Callable[[str], Checkpoint]


def checkpoint_folders(model_dir: str) -> list[str]:
  """Returns the paths of all checkpoints, even damaged ones, oldest first."""
  root = ModelDir(model_dir).checkpoints
  names = os.listdir(root) if os.path.isdir(root) else []
  steps = {name: step_of(name) for name in names if step_of(name) is not None}
  return [os.path.join(root, name) for name in sorted(steps, key=steps.get)]


def find_checkpoints(model_dir: str) -> list[Checkpoint]:
  """Returns the checkpoints whose files have the right sizes, oldest first."""
  # Hashes are not compared, because hashing reads every byte.
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
  model_dir: str,
  setting: str = "MODEL_DIR",
  *,
  read: ReadCheckpoint | None = None,
) -> Checkpoint | None:
  """Returns the newest whole checkpoint; None if there are no checkpoints.

  Args:
    model_dir: MODEL_DIR, which need not exist.
    setting: name of the setting whose value is `model_dir`, for messages.
    read: reads a checkpoint, and raises unless it is whole; None: `read_whole`.

  Raises:
    UserError: all checkpoints are damaged, or one cannot be read.
  """
  while True:
    paths = checkpoint_folders(model_dir)
    with contextlib.suppress(RemovedCheckpointError):
      given = f"{setting} = {model_dir!r}"
      return first_whole(paths[::-1], given, read or read_whole)


def first_whole(
  paths: Sequence[str], given: str, read: ReadCheckpoint
) -> Checkpoint | None:
  """Returns the first checkpoint that is whole; None if there are no paths.

  The `paths` are tried in order. Messages begin with `given`, for example
  "SETTING = 'folder'". `read` raises unless a checkpoint is whole.

  Raises UserError if all checkpoints are damaged, or one cannot be read. Raises
  RemovedCheckpointError if a checkpoint was removed while it was read.
  """
  for path in paths:
    try:
      return read(path)
    except RemovedCheckpointError:
      raise
    except DamagedCheckpointError as error:
      warn_of_damage(path, error)
  # If None were returned, training would start from scratch and lose its steps.
  if paths:
    raise UserError(
      f"{given}: none of its {len(paths)} checkpoints is whole (see above); "
      "mend one, or choose another folder."
    )
  return None


def warn_of_damage(path: str, error: DamagedCheckpointError) -> None:
  """Logs a warning that a checkpoint is damaged, with the reason."""
  _logger.warning(f"DAMAGED checkpoint {path}: {error}; it is not used")


def read_whole(path: str, *, hold: bool = False) -> Checkpoint:
  """Returns a checkpoint after comparing every file with its hash.

  Args:
    hold: whether to keep the files open, because a trainer may remove them.
      If so, large files that have not changed since an earlier call are not
      hashed again.

  Raises:
    DamagedCheckpointError: a file is missing, truncated or changed.
    UserError: a file cannot be read, or another version wrote the manifest.
  """
  checkpoint = read_checkpoint(path)
  if hold:
    with reading(path, WEIGHTS):
      held = OpenWeights(checkpoint.prefix)
    checkpoint = dataclasses.replace(checkpoint, held=held)
  found = {}
  for name in checkpoint.files:
    with reading(path, name):
      if hold:
        found[name] = hash_unless_known(held.path(name))
      else:
        found[name] = hash_file(os.path.join(path, name))
  return verify(checkpoint, found)


read_and_hold = functools.partial(read_whole, hold=True)


def verify(checkpoint: Checkpoint, found: Mapping[str, str]) -> Checkpoint:
  """Compares files' hashes; returns the checkpoint with `is_verified` set.

  `found` has the current hash of every file, by file name. Raises
  DamagedCheckpointError if a file does not hold the bytes that were written.
  """
  for name, (_, expected) in checkpoint.files.items():
    if found[name] != expected:
      raise DamagedCheckpointError(
        f"{name} does not hold the bytes that were written"
      )
  return dataclasses.replace(checkpoint, is_verified=True)


def read_checkpoint(path: str) -> Checkpoint:
  """Returns a checkpoint after comparing the sizes of its files.

  Raises DamagedCheckpointError if a file is missing or truncated, or the
  manifest changed. Raises UserError if a file cannot be read, or another
  version wrote the manifest.
  """
  try:
    with reading(path, MANIFEST):
      content, digest = read_sealed(os.path.join(path, MANIFEST), _SEAL)
  except UserError:
    raise
  except ValueError:  # it is not JSON, or its hash is wrong
    raise DamagedCheckpointError(
      f"{MANIFEST} does not say what was written"
    ) from None
  try:
    # JSON stores tuples as lists, but hashes and shapes are compared as tuples.
    files = {
      name: (operator.index(size), d)
      for name, (size, d) in content.pop("files").items()
    }
    if not all(_FILE_NAME.fullmatch(name) for name in files):
      raise ValueError
    content["shapes"] = {
      k: tuple(map(operator.index, v)) for k, v in content["shapes"].items()
    }
    manifest = Manifest(**content)
  except (ValueError, TypeError, KeyError, AttributeError):
    # The manifest's own hash is right, so another version of palm_mtf wrote it.
    raise UserError(
      f"{path} is of another version of palm_mtf, and only that version can "
      "read it; use that version, or move the folder away."
    ) from None
  for name, (size, _) in files.items():
    with reading(path, name):
      actual = check_regular(os.path.join(path, name))
    if actual != size:
      raise DamagedCheckpointError(f"{name} has {actual:,} of {size:,} bytes")
  return Checkpoint(path, manifest, files, digest)


@contextlib.contextmanager
def reading(folder: str, name: str) -> Iterator[None]:
  """Turns errors of the body, which reads the file `name`, into our errors.

  Raises RemovedCheckpointError if the folder is missing. Raises
  DamagedCheckpointError if only the file is missing. Raises UserError if the
  file exists but cannot be read.
  """
  try:
    yield
  except OSError as error:
    what = f"{name}: {error.strerror}"
    if _is_gone(folder):
      raise RemovedCheckpointError(what) from None
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
      raise DamagedCheckpointError(what) from None
    # The file may be undamaged, for example if only the permission to read it
    # is missing, so this is not DamagedCheckpointError.
    raise UserError(
      f"cannot read {os.path.join(folder, name)}: {error.strerror}; mend that, "
      f"or move {folder} away."
    ) from None


def _is_gone(path: str) -> bool:
  try:
    os.lstat(path)
  except OSError as error:
    return isinstance(error, FileNotFoundError)
  return False


def write_manifest(
  folder: str,
  manifest: Manifest,
  seals: Mapping[str, FileSeal] | None = None,
) -> None:
  """Writes manifest.json, with the size and hash (the seal) of each file.

  `seals` has the known seals, by file name; other files are hashed here.
  """
  files = dict(seals or {})
  for name in sorted(set(os.listdir(folder)) - files.keys()):
    path = os.path.join(folder, name)
    files[name] = os.path.getsize(path), hash_file(path)
  content = seal({**dataclasses.asdict(manifest), "files": files}, _SEAL)
  with open(os.path.join(folder, MANIFEST), "w", encoding="utf-8") as file:
    file.write(json_text(content, indent=1))


def last_good(newest: Checkpoint | None) -> str:
  """Returns a sentence for messages that names the newest checkpoint."""
  if newest:
    return f"The last good checkpoint is {newest.path}."
  return "There is no checkpoint yet."
