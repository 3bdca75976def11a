# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensors of TensorFlow's checkpoint files as NumPy arrays."""

from collections.abc import Callable, Mapping

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.model_dir.tensorflow_errors import as_os_errors


def array_reader(prefix: str) -> Callable[[str], np.ndarray]:
  """Returns a function that reads one variable by its name.

  Args:
    prefix: TensorFlow's prefix of the files.
  """
  return tf.train.load_checkpoint(prefix).get_tensor


def write_arrays(prefix: str, arrays: Mapping[str, np.ndarray]) -> None:
  """Writes float32 variables under a prefix; raises OSError if it cannot."""
  with tf.Graph().as_default():
    values = [tf.placeholder(x.dtype, x.shape) for x in arrays.values()]
    write = tf.raw_ops.SaveV2(
      prefix=prefix,
      tensor_names=list(arrays),
      shape_and_slices=[""] * len(arrays),
      tensors=values,
    )
    config = tf.ConfigProto(device_count={"GPU": 0})
    with tf.Session(config=config) as session, as_os_errors():
      session.run(write, dict(zip(values, arrays.values(), strict=True)))
