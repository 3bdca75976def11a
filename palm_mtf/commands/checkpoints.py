# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf checkpoints`: lists, verifies, compares and prunes checkpoints."""

# Only `compare` reads tensors, so only it imports TensorFlow (takes seconds).

import datetime
import os
import shutil
from collections.abc import Iterable, Sequence
from typing import Any

from palm_mtf.checkpoints import manifest, named_weights, weights_to_load
from palm_mtf.checkpoints.writer import removable, remove_checkpoint
from palm_mtf.console import format_table, print_results
from palm_mtf.errors import UserError, check_count, suggest_name
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.atomic_files import writing
from palm_mtf.model_dir.json_lines import read_json_lines
from palm_mtf.model_dir.lock import training_lock
from palm_mtf.model_dir.paths import ModelDir, step_of
from palm_mtf.report.page import is_number

_WHOLE = "whole"
_BASE = "the base"  # of an adapter


def list_all(*, model_dir: str, as_json: bool) -> None:
  """Prints checkpoints' steps, dates, sizes, losses, and if they are whole."""
  losses = _read_losses(model_dir)
  rows = []
  for path in _find_folders(model_dir):
    row = {"step": step_of(path), "path": path, "state": _WHOLE}
    try:
      # For speed, `read_checkpoint` compares only file sizes. The command
      # `checkpoints verify` hashes all bytes.
      checkpoint = manifest.read_checkpoint(path)
      secs = int(os.path.getmtime(os.path.join(path, manifest.MANIFEST)))
      written = datetime.datetime.fromtimestamp(secs)  # in local time
      row["written"] = written.isoformat(" ")
      row["bytes"] = sum(size for size, _ in checkpoint.files.values())
      if checkpoint.manifest.settings.get("EXCHANGE") == "diloco":
        row["weights"] = "outer"  # the mean of pods or learners
    except (manifest.RemovedCheckpointError, FileNotFoundError):
      continue  # a training run has just removed it
    except manifest.DamagedCheckpointError as error:
      row["state"] = f"damaged: {error}"
    except UserError as error:
      row["state"] = f"not read: {error}"
    rows.append(row | losses.get(row["step"], {}))
  for path in _find_set_aside(model_dir):
    step = step_of(path.partition(".damaged")[0])
    rows.append({"step": step, "path": path, "state": "set aside"})
  if as_json:
    for row in rows:
      print(json_text(row))
    return
  head = ("step", "written", "megabytes", "loss", "validation loss", "state")
  table = [
    (
      f"{row['step']:,}",
      row.get("written", "-"),
      f"{row['bytes'] / 1e6:,.1f}" if "bytes" in row else "-",
      f"{row['loss']:.4f}" if "loss" in row else "-",
      f"{row['validation_loss']:.4f}" if "validation_loss" in row else "-",
      row["state"] + (", outer weights" if "weights" in row else ""),
    )
    for row in rows
  ]
  print(format_table([head, *table], ">>>>><"))


def verify(*, model_dir: str, as_json: bool) -> None:
  """Finds damaged checkpoints: compares all their files with stored hashes.

  Raises UserError if the folder does not exist or holds no checkpoint, or a
  checkpoint is damaged or cannot be read.
  """
  damaged, paths = [], _find_folders(model_dir)
  for path in paths:
    try:
      state = _check_state(path)
    except manifest.RemovedCheckpointError:
      continue  # a training run has just removed it
    # Print each state immediately, because hashing gigabytes takes seconds.
    row = {"step": step_of(path), "path": path, "state": state}
    print(json_text(row) if as_json else f"{path}  {state}")
    if state != _WHOLE:
      damaged.append(os.path.basename(path))
  if damaged:
    raise UserError(
      f"{len(damaged)} of {len(paths)} checkpoints in {model_dir} are damaged: "
      f"{', '.join(damaged)}; training resumes from the newest whole one."
    )


def compare(*, first: str, second: str, as_json: bool) -> None:
  """Prints how two checkpoints differ in their tensors and settings.

  `first` and `second` are paths of checkpoints or MODEL_DIRs, or TensorFlow's
  checkpoint prefixes.
  """
  a, b = weights = (
    named_weights.find_weights("A", first),
    named_weights.find_weights("B", second),
  )
  ours, theirs = map(named_weights.read_shapes, weights)
  shared = sorted(ours.keys() & theirs.keys())
  other_shapes = {
    name: [list(ours[name]), list(theirs[name])]
    for name in shared
    if ours[name] != theirs[name]
  }
  differences = _compare_tensors(weights, set(shared) - other_shapes.keys())
  settings = _compare_settings(a, b)
  is_equal = ours == theirs and not differences and _BASE not in settings
  found = {
    "first": a.place,
    "second": b.place,
    "tensors": len(shared),
    "only_in_first": sorted(ours.keys() - theirs.keys()),
    "only_in_second": sorted(theirs.keys() - ours.keys()),
    "other_shapes": other_shapes,
    "max_difference": differences,
    "other_settings": settings,
    "bitwise_equal": is_equal,
  }
  print_results(found, as_json, " ")


def prune(
  *, model_dir: str, keep: int, keep_every_steps: int | None, as_json: bool
) -> None:
  """Removes damaged and old checkpoints; prints what it removed.

  Raises UserError if a process is training in the folder, no checkpoint is
  whole, or a checkpoint cannot be read or removed.
  """
  check_count("--keep", keep)
  if keep_every_steps is not None:
    check_count("--keep_every_steps", keep_every_steps)
  _find_folders(model_dir)  # raises UserError before the lock makes the folder
  with training_lock(model_dir):
    states = {path: _check_state(path) for path in _find_folders(model_dir)}
    whole = [path for path, state in states.items() if state == _WHOLE]
    # If no checkpoint is whole, remove none, because the run has no other
    # weights, and the user may be able to repair a checkpoint.
    if not whole:
      raise UserError(
        f"MODEL_DIR = {model_dir!r}: none of its {len(states)} checkpoints "
        "is whole; nothing was removed."
      )
    # Damaged checkpoints do not count towards `keep`, and are all removed.
    old = dict.fromkeys(removable(whole, keep, keep_every_steps), "old")
    removed = {p: state for p, state in states.items() if state != _WHOLE} | old
    for path in sorted(removed):
      remove_checkpoint(path)
    for path in _find_set_aside(model_dir):
      removed[path] = "set aside"
      with writing(path, None):
        shutil.rmtree(path)
  for path, reason in sorted(removed.items()):
    row = {"removed": path, "reason": reason}
    print(json_text(row) if as_json else f"removed {path} ({reason})")
  if not removed and not as_json:
    print(f"nothing to remove: {model_dir} has {len(whole)} checkpoints")


def _find_folders(model_dir: str) -> list[str]:
  """Returns paths of checkpoints, oldest first; UserError if there are none."""
  if not os.path.isdir(model_dir):
    raise UserError(
      f"MODEL_DIR = {model_dir!r}: there is no such folder"
      f"{suggest_name(model_dir)}; give the MODEL_DIR of a run."
    )
  paths = manifest.checkpoint_folders(model_dir)
  if not paths:
    raise UserError(
      f"MODEL_DIR = {model_dir!r}: holds no checkpoint; give the MODEL_DIR "
      "of a run."
    )
  return paths


def _find_set_aside(model_dir: str) -> list[str]:
  # Finds the damaged checkpoints, which training renamed to step_<n>.damaged.
  root = ModelDir(model_dir).checkpoints
  return sorted(
    os.path.join(root, name)
    for name in os.listdir(root)
    if name.startswith("step_") and ".damaged" in name
  )


def _check_state(path: str) -> str:
  # Do not catch UserError: a checkpoint that cannot be read now, or that
  # another version wrote, may be whole, so `prune` must not remove it.
  try:
    manifest.read_whole(path)
  except manifest.RemovedCheckpointError:
    raise
  except manifest.DamagedCheckpointError as error:
    return f"damaged: {error}"
  return _WHOLE


def _read_losses(model_dir: str) -> dict[int, dict[str, float]]:
  """Returns {step: {"loss" or "validation_loss": nats per token}}."""
  names = ("loss", "validation_loss")
  return {
    line["step"]: {x: line[x] for x in names if is_number(line.get(x))}
    for line in read_json_lines(ModelDir(model_dir).metrics, number="step")
  }


def _compare_tensors(
  weights: Sequence[named_weights.NamedWeights], names: Iterable[str]
) -> dict[str, float | str]:
  """Returns {name of a tensor that differs: largest difference of elements}."""
  import numpy as np

  from palm_mtf._tf import tf

  readers = [tf.train.load_checkpoint(each.prefix) for each in weights]
  differences = {}
  # Read tensor by tensor, because two whole models may not fit in memory.
  for name in sorted(names):
    a, b = map(_read_tensor, weights, readers, [name] * 2)
    # Compare bytes, not values: -0 equals 0, and NaN does not equal NaN.
    if a.tobytes() != b.tobytes():
      largest = float(np.max(np.abs(a.astype(np.float64) - b)))
      # Infinity and NaN become strings, because JSON does not have them.
      differences[name] = largest if np.isfinite(largest) else str(largest)
  return differences


def _read_tensor(
  weights: named_weights.NamedWeights, reader: Any, name: str
) -> Any:
  with named_weights.reading(weights):
    return reader.get_tensor(name)


def _compare_settings(
  a: named_weights.NamedWeights, b: named_weights.NamedWeights
) -> dict[str, list[Any]]:
  """Returns {macro: [value in a, value in b]} for the macros that differ."""
  if not a.checkpoint or not b.checkpoint:
    return {}  # a TensorFlow prefix has no manifest
  # Compare hashes of the tokens and of an adapter's base too: with the same
  # TEXT_FILES or INIT_CHECKPOINT, the content of the files may differ.
  ours, theirs = (
    {
      **weights_to_load.settings_of(x),
      "the tokens": x.data.get("the tokens"),
      _BASE: (x.base or {}).get("blake2b"),
    }
    for x in (a.checkpoint.manifest, b.checkpoint.manifest)
  )
  return {
    name: [ours.get(name), theirs.get(name)]
    for name in sorted(ours.keys() | theirs.keys())
    if ours.get(name) != theirs.get(name)
  }
