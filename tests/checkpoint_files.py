# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes small checkpoints without tensors, for tests of files."""

from palm_mtf.checkpoints.manifest import Checkpoint, Manifest, find_checkpoints
from palm_mtf.checkpoints.writer import write_checkpoint

SHAPES = {"embedding": (4, 2), "final_norm/scale": (2,)}


def manifest(step: int) -> Manifest:
  """Returns the manifest of a small model."""
  return Manifest(
    step=step,
    shapes=SHAPES,
    vocabulary_sha256="f00d",
    data={"SEED": 0},
    settings={"SEED": 0, "PROMPTS": ["a"]},
    versions={"palm_mtf": "0"},
    next_row=4 * step,
  )


def text_writer(text: str):
  """Returns a function that writes `text` in place of the weights."""

  def write_weights(prefix):
    with open(f"{prefix}.data", "w") as file:
      file.write(text)

  return write_weights


def write(
  model_dir, step: int, keep: int = 10, text: str = "weights", every=None
) -> Checkpoint:
  """Writes a checkpoint of one file that holds `text`."""
  return write_checkpoint(
    str(model_dir),
    manifest(step),
    text_writer(text),
    keep=keep,
    keep_every_steps=every,
  )


def steps_of(model_dir) -> list[int]:
  """Returns the steps of the checkpoints in `model_dir`."""
  found = find_checkpoints(str(model_dir))
  return [checkpoint.manifest.step for checkpoint in found]


def save_tensors(prefix, **tensors) -> None:
  """Writes a TensorFlow checkpoint; "__" in a name stands for "/"."""
  from palm_mtf._tf import tf  # tests of files do not need TensorFlow

  tf.raw_ops.SaveV2(
    prefix=str(prefix),
    tensor_names=[name.replace("__", "/") for name in tensors],
    shape_and_slices=[""] * len(tensors),
    tensors=list(tensors.values()),
  )
