# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Saves and restores variables slice by slice, in TensorFlow's own format.

Each slice is written from, and read into, the device that holds it, as a named
part of the whole variable. `tf.train.load_checkpoint` reads whole variables
from the file, and so does a program under any other layout. Which files there
are, and which of them are whole, is the business of checkpoints.py.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from palm_mtf._tf import tf
from palm_mtf.mesh.placement import Slice


@dataclasses.dataclass(frozen=True)
class Saver:
  """Operations on a checkpoint whose path is fed.

  Attributes:
    prefix: [], string: feed the path, without the suffixes TensorFlow adds.
    save: writes it.
    restore: reads it into every slice.
  """

  prefix: tf.Tensor
  save: tf.Operation
  restore: tf.Operation


def build_saver(slices: Mapping[str, Sequence[Slice]]) -> Saver:
  """Builds the operations for the variables of `slices`, by checkpoint name."""
  parts = [(name, part) for name in slices for part in slices[name]]
  prefix = tf.placeholder(tf.string, [], "checkpoint_prefix")
  saved = [(name, part) for name, part in parts if part.is_first]
  save = tf.raw_ops.SaveV2(
    prefix=prefix,
    tensor_names=[name for name, _ in saved],
    shape_and_slices=[part.spec for _, part in saved],
    tensors=[part.variable.read_value() for _, part in saved],
  )
  assignments = []
  for name, part in parts:
    # One operation a slice, on its own device: nothing is read twice, and no
    # device holds more than its slices.
    with tf.device(part.variable.device):
      (value,) = tf.raw_ops.RestoreV2(
        prefix=prefix,
        tensor_names=[name],
        shape_and_slices=[part.spec],
        dtypes=[tf.float32],
      )
      assignments.append(part.variable.assign(value).op)
  return Saver(prefix, save, tf.group(assignments))
