# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a MODEL_DIR: which are whole, and whose they are.

  MODEL_DIR/checkpoints/step_00000200/{manifest.json, weights.*}

A checkpoint is a folder that appears under its name when all of it is written,
and only then are older ones removed. Its manifest says what it holds, so that
another model is refused before TensorFlow is imported. Tensors are written and
read by mesh/saving.py; this module touches only files.
"""

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping

from palm_mtf.console import say
from palm_mtf.disk import new_folder
from palm_mtf.errors import UserError

_FOLDER = re.compile(r"step_(\d{8,})")
WEIGHTS = "weights"
_MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """What a checkpoint holds.

  Attributes:
    step: training steps done.
    shapes: shape of every parameter, by its name.
    vocabulary_sha256: of the SentencePiece model.
    data: what the batch of a step depends on: SEED, GLOBAL_BATCH_SIZE,
      SEQUENCE_LENGTH, a hash of the tokens, and what spikes.py keeps.
    version: of palm_mtf.
  """

  step: int
  shapes: Mapping[str, tuple[int, ...]]
  vocabulary_sha256: str
  data: Mapping[str, object]
  version: str


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A whole checkpoint: its folder and its manifest."""

  path: str
  manifest: Manifest

  @property
  def prefix(self) -> str:
    """What TensorFlow calls the checkpoint's path."""
    return os.path.join(self.path, WEIGHTS)


def find_checkpoints(model_dir: str) -> list[Checkpoint]:
  """Returns the whole checkpoints of `model_dir`, oldest first.

  Says on stderr which folder is not whole. `model_dir` need not exist.
  """
  root = os.path.join(model_dir, "checkpoints")
  names = os.listdir(root) if os.path.isdir(root) else []
  found = []
  for name in filter(_FOLDER.fullmatch, names):
    path = os.path.join(root, name)
    try:
      found.append(Checkpoint(path, _read_manifest(path)))
    except (OSError, ValueError, TypeError, KeyError) as error:
      say(f"checkpoint {path} is not whole ({error}): passed over")
  return sorted(found, key=lambda checkpoint: checkpoint.manifest.step)


def newest_checkpoint(
  model_dir: str, shapes: Mapping[str, tuple[int, ...]]
) -> Checkpoint:
  """Returns the newest whole checkpoint, for whoever cannot do without one.

  Raises:
    UserError: there is none, or it is of another model than `shapes`.
  """
  found = find_checkpoints(model_dir)
  if not found:
    raise UserError(
      f"MODEL_DIR = {model_dir!r}: holds no checkpoint; train one there with "
      "palm_mtf train, or give the folder of a run."
    )
  check_same_model(found[-1], shapes)
  return found[-1]


def _read_manifest(path: str) -> Manifest:
  """Reads the manifest and checks that every file has the size it names."""
  with open(os.path.join(path, _MANIFEST), encoding="utf-8") as file:
    content = json.load(file)
  for name, size in content.pop("file_bytes").items():
    actual = os.path.getsize(os.path.join(path, name))
    if actual != size:
      raise ValueError(f"{name} has {actual:,} of {size:,} bytes")
  content["shapes"] = {k: tuple(v) for k, v in content["shapes"].items()}
  return Manifest(**content)


def write_checkpoint(
  model_dir: str,
  manifest: Manifest,
  write_weights: Callable[[str], None],
  keep: int,
) -> Checkpoint:
  """Writes a checkpoint whole or not at all, then removes the oldest.

  Args:
    model_dir: MODEL_DIR.
    manifest: what it holds.
    write_weights: writes the tensors under the path prefix it is given.
    keep: how many of the newest stay.

  Raises:
    UserError: the disk is full, or MODEL_DIR cannot be written.
  """
  root = os.path.join(model_dir, "checkpoints")
  path = os.path.join(root, f"step_{manifest.step:08d}")
  shutil.rmtree(path, ignore_errors=True)  # one that was not whole
  with new_folder(path, checkpoint_bytes(manifest.shapes)) as folder:
    write_weights(os.path.join(folder, WEIGHTS))
    sizes = {
      name: os.path.getsize(os.path.join(folder, name))
      for name in sorted(os.listdir(folder))
    }
    content = {**dataclasses.asdict(manifest), "file_bytes": sizes}
    with open(os.path.join(folder, _MANIFEST), "w", encoding="utf-8") as file:
      json.dump(content, file, indent=1)
      file.flush()
      os.fsync(file.fileno())
  for old in find_checkpoints(model_dir)[:-keep]:
    shutil.rmtree(old.path)
  return Checkpoint(path, manifest)


def checkpoint_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
  """Returns the size of a checkpoint: three float32 numbers a parameter."""
  return sum(3 * 4 * math.prod(shape) for shape in shapes.values())


def check_space(
  model_dir: str,
  shapes: Mapping[str, tuple[int, ...]],
  *,
  keep: int,
  num_found: int,
) -> None:
  """Raises UserError unless the disk takes the checkpoints of a run.

  These are `keep` and, while the newest is written, one more; the `num_found`
  that are there already have their room.
  """
  existing = os.path.abspath(model_dir)
  while not os.path.exists(existing):
    existing = os.path.dirname(existing)
  count = max(1, keep + 1 - num_found)
  needed = count * checkpoint_bytes(shapes)
  free = shutil.disk_usage(existing).free
  if free < needed:
    raise UserError(
      f"MODEL_DIR = {model_dir!r}: KEEP_CHECKPOINTS = {keep} needs room for "
      f"{count} more, {needed:,} bytes, and its disk has {free:,} free; free "
      "some, keep fewer, or choose another MODEL_DIR."
    )


def check_same_model(
  checkpoint: Checkpoint,
  shapes: Mapping[str, tuple[int, ...]],
  vocabulary_sha256: str | None = None,
) -> None:
  """Raises UserError if `checkpoint` is of another model or vocabulary."""
  held = checkpoint.manifest.shapes
  for name in dict.fromkeys([*shapes, *held]):
    if held.get(name) != shapes.get(name):
      raise UserError(
        f"{checkpoint.path} has {name} {_shape_text(held.get(name))}, the "
        f"model wants {_shape_text(shapes.get(name))}: it is of another model; "
        "use the models/*.gin it was trained with, or another MODEL_DIR."
      )
  if vocabulary_sha256 not in (None, checkpoint.manifest.vocabulary_sha256):
    raise UserError(
      f"{checkpoint.path} was trained with another vocabulary than VOCABULARY; "
      "its tokens would mean other texts. Use its own, or another MODEL_DIR."
    )


def _shape_text(shape: tuple[int, ...] | None) -> str:
  return "nothing" if shape is None else str(list(shape))
