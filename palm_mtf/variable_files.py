# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads the variables of a session from files, and writes a copy of them.

Copying into host memory is all that training waits for. The copy is written by
a session of its own on the CPU, from any thread.
"""

import errno
from collections.abc import Callable, Mapping, Sequence

from palm_mtf._tf import tf
from palm_mtf.errors import UserError
from palm_mtf.mesh.placement import Slice
from palm_mtf.mesh.saving import (
  build_file_writer,
  build_restorer,
  slice_values,
)
from palm_mtf.named_weights import NamedWeights

# How TensorFlow says that a file is not what it should be.
_DAMAGE = (
  tf.errors.DataLossError,
  tf.errors.InvalidArgumentError,
  tf.errors.NotFoundError,
  tf.errors.OutOfRangeError,
)


def restore(
  session: tf.Session,
  pods: Sequence[Mapping[str, Sequence[Slice]]],
  prefix: str,
  client: str = "/device:cpu:0",
) -> None:
  """Reads variables of the current graph from a file.

  Args:
    session: holds the variables.
    pods: the slices of each pod, by checkpoint name.
    prefix: of the file.
    client: the device of the process that reads it.
  """
  restorer = build_restorer(pods, client)
  session.run(restorer.restore, {restorer.prefix: prefix})


def restore_weights(
  session: tf.Session,
  pods: Sequence[Mapping[str, Sequence[Slice]]],
  weights: NamedWeights,
  client: str,
) -> None:
  """Reads parameters from another run's file; see `restore`.

  Raises:
    UserError: the file is damaged.
  """
  try:
    restore(session, pods, weights.prefix, client)
  except _DAMAGE as error:  # others are of the session: a pod may be lost
    raise UserError(
      f"{weights.given}: TensorFlow cannot read it: "
      f"{error.message.splitlines()[0]}"
    ) from None


class WeightsCopier:
  """Copies and writes the variables of one program."""

  def __init__(
    self,
    session: tf.Session,
    slices: Mapping[str, Sequence[Slice]],
    client: str = "/device:cpu:0",
  ):
    """Adds what reads `slices` to the graph of `session`, the current one.

    Args:
      session: holds the variables.
      slices: by checkpoint name.
      client: the device of the process that writes.
    """
    self._fetch = session.make_callable(slice_values(slices, client))
    self._writer = build_file_writer(slices)

  def copy(self) -> Callable[[str], None]:
    """Copies every variable; returns what writes the copy under a prefix.

    What is returned raises OSError where the disk refuses.
    """
    values = self._fetch()

    def write(prefix: str) -> None:
      writer = self._writer
      feed = dict(zip(writer.values, values, strict=True))
      config = tf.ConfigProto(device_count={"GPU": 0})
      try:
        with tf.Session(graph=writer.graph, config=config) as session:
          session.run(writer.write, {**feed, writer.prefix: prefix})
      except tf.errors.ResourceExhaustedError as error:  # no space left
        raise OSError(errno.ENOSPC, error.message) from error
      except tf.errors.OpError as error:
        raise OSError(errno.EIO, error.message) from error

    return write
