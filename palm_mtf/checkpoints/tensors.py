# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Saves and restores variables slice by slice, in TensorFlow's own format.

A slice is in the file as a named part of the whole variable; of a stack of
slices, each is. `tf.train.load_checkpoint` reads whole variables from the file,
and so does a program under any other layout. Only the client reads and writes
files, each slice once: from there it goes to every device that holds it, of all
pods.

Copying into host memory is all that training waits for. The copy is written by
a session of its own on the CPU, from any thread. Which files there are, and
which of them are whole, is in manifest.py.
"""

import collections
import dataclasses
import errno
from collections.abc import Callable, Mapping, Sequence

from palm_mtf._tf import tf
from palm_mtf.checkpoints.locate import NamedWeights
from palm_mtf.errors import UserError
from palm_mtf.mesh.slices import Slice, padded

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
    prefix: path prefix of the file, as TensorFlow calls it.
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


@dataclasses.dataclass(frozen=True)
class Restorer:
  """An operation that reads a checkpoint whose path is fed.

  Attributes:
    prefix: [], string: feed the path, without the suffixes TensorFlow adds.
    restore: reads it into every slice.
  """

  prefix: tf.Tensor
  restore: tf.Operation


def build_restorer(
  pods: Sequence[Mapping[str, Sequence[Slice]]], client: str
) -> Restorer:
  """Builds what reads the variables of all pods.

  Args:
    pods: the slices of each pod; all pods have slices of the same.
    client: the device that reads.
  """
  with tf.device(client):
    prefix = tf.placeholder(tf.string, [], "checkpoint_prefix")
  assignments, done = [], []
  for key, (first, *_) in pods[0].items():
    with tf.device(client):
      names = tf.constant(first.names)
    by_spec = collections.defaultdict(list)
    for slices in pods:
      for part in slices[key]:
        by_spec[part.spec].append(part)
    for parts in by_spec.values():
      # One after the other: the client need not hold more than two values.
      with tf.device(client), tf.control_dependencies(done[:-1]):
        value = _read(prefix, names, parts[0])
      done = [
        *done[-1:],
        tf.group([each.variable.assign(value).op for each in parts]),
      ]
      assignments.append(done[-1])
  return Restorer(prefix, tf.group(assignments))


def _read(prefix: tf.Tensor, names: tf.Tensor, part: Slice) -> tf.Tensor:
  """Returns the value of a device's variable from a file, with its padding."""
  shape, dtype = part.variable.shape.as_list(), part.variable.dtype.base_dtype
  if part.spec is None:
    return tf.zeros(shape, dtype)
  num = len(part.names)
  values = tf.raw_ops.RestoreV2(
    prefix=prefix,
    tensor_names=names,
    shape_and_slices=tf.fill([num], part.spec),
    dtypes=[dtype] * num,
  )
  value = part.of_rows([tf.ensure_shape(x, part.sizes) for x in values])
  return padded(value, shape)


@dataclasses.dataclass(frozen=True)
class FileWriter:
  """An operation that writes fed slices to a checkpoint file.

  It stands in a graph of its own, without devices and variables, so that
  writing and training know nothing of each other.

  Attributes:
    graph: what it stands in.
    prefix: [], string: feed the path, without the suffixes TensorFlow adds.
    values: feed what `slice_values` gave, fetched.
    write: writes them.
  """

  graph: tf.Graph
  prefix: tf.Tensor
  values: list[tf.Tensor]
  write: tf.Operation


def slice_values(
  slices: Mapping[str, Sequence[Slice]], client: str
) -> list[tf.Tensor]:
  """Returns the value of every slice to save, each part of a variable once.

  Each comes to `client`, the device of the process that fetches it, as a
  message of its own. A server that is asked for values answers with one message
  for all of them, and gRPC counts its bytes in 32 bits.
  """
  values = []
  for part in _saved(slices):
    value, sizes = part.read(), _saved_sizes(part)
    if value.shape.as_list() != sizes:
      with tf.device(part.near):  # padding stays here
        value = tf.slice(value, [0] * len(sizes), sizes)
    with tf.device(client):  # pod 0 -> client
      values.append(tf.identity(value))
  return values


def build_file_writer(slices: Mapping[str, Sequence[Slice]]) -> FileWriter:
  """Builds what writes what `slice_values` gave of the same slices."""
  saved = _saved(slices)
  with tf.Graph().as_default() as graph:
    prefix = tf.placeholder(tf.string, [], "checkpoint_prefix")
    values = [
      tf.placeholder(part.variable.dtype.base_dtype, _saved_sizes(part))
      for part in saved
    ]
    rows = zip(saved, values, strict=True)
    write = tf.raw_ops.SaveV2(
      prefix=prefix,
      tensor_names=[name for part in saved for name in part.names],
      shape_and_slices=[part.spec for part in saved for _ in part.names],
      tensors=[row for part, value in rows for row in part.rows(value)],
    )
  return FileWriter(graph, prefix, values, write)


def _saved(slices: Mapping[str, Sequence[Slice]]) -> list[Slice]:
  return [
    part
    for parts in slices.values()
    for part in parts
    if part.is_first and part.spec is not None
  ]


def _saved_sizes(part: Slice) -> list[int]:
  """Returns those of its variable without padding."""
  return [*([len(part.names)] if len(part.names) > 1 else []), *part.sizes]
