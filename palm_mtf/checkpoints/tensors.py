# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensors of checkpoints, saved and restored slice by slice.

The format is TensorFlow's own. Only the client reads and writes files, each
slice once. Files and their hashes are those of manifest.py.
"""

import collections
import dataclasses
import errno
import re
from collections.abc import Callable, Mapping, Sequence

from palm_mtf._tf import tf
from palm_mtf.checkpoints.locate import NamedWeights
from palm_mtf.checkpoints.open_weights import OpenWeights
from palm_mtf.errors import UserError
from palm_mtf.mesh.slices import Slice, padded

# TensorFlow's errors for a damaged file.
_DAMAGE = (
  tf.errors.DataLossError,
  tf.errors.InvalidArgumentError,
  tf.errors.NotFoundError,
  tf.errors.OutOfRangeError,
)

# What comes before the statement in its errors of a graph.
_TRACE = re.compile(r"Graph execution error:.*?\nNode: '[^\n]*\n", re.DOTALL)


def restore(
  session: tf.Session,
  pods: Sequence[Mapping[str, Sequence[Slice]]],
  prefix: str,
  client: str = "/device:cpu:0",
) -> None:
  """Restores the variables of a session from a file.

  Args:
    session: session of the current graph.
    pods: slices of each pod, by checkpoint name.
    prefix: TensorFlow's prefix of the file.
    client: device of the process that reads the file.
  """
  restorer, files = build_restorer(pods, client), OpenWeights(prefix)
  session.run(restorer.restore, {restorer.prefix: files.prefix})
  files.close()


def restore_weights(
  session: tf.Session,
  pods: Sequence[Mapping[str, Sequence[Slice]]],
  weights: NamedWeights,
  client: str,
) -> None:
  """Restores parameters from the weights of another run, as `restore` does.

  Raises:
    UserError: the file is damaged.
  """
  try:
    restore(session, pods, weights.prefix, client)
  except _DAMAGE as error:  # other errors are of the session: a pod may be lost
    raise UserError(
      f"{weights.given}: TensorFlow cannot read it: {_reason(error)}"
    ) from None


def _reason(error: tf.errors.OpError) -> str:
  """Returns the line of TensorFlow's message that says what is wrong."""
  # Before it are "Graph execution error:" and the operation's place in our
  # code, behind it the operation again.
  return _TRACE.sub("", error.message).splitlines()[0]


class WeightsCopier:
  """Copies the variables of a program to host memory, and writes the copy.

  Training waits for the copy alone; the copy is written from any thread.
  """

  def __init__(
    self,
    session: tf.Session,
    slices: Mapping[str, Sequence[Slice]],
    client: str = "/device:cpu:0",
  ):
    """Adds reads of all slices to the current graph.

    Args:
      session: session of the current graph.
      slices: slices of each variable, by checkpoint name.
      client: device of the process that writes files.
    """
    self._fetch = session.make_callable(slice_values(slices, client))
    self._writer = build_file_writer(slices)

  def copy(self) -> Callable[[str], None]:
    """Copies every variable; returns a function that writes the copy.

    The function takes TensorFlow's prefix, and raises OSError for the disk.
    """
    values = self._fetch()  # devices -> client -> host memory

    def write(prefix: str) -> None:
      writer = self._writer
      feed = dict(zip(writer.values, values, strict=True))
      # On the CPU: a GPU's memory belongs to the session that trains.
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
  """An operation that restores every slice from a file."""

  prefix: tf.Tensor  # [], string, fed: TensorFlow's prefix of the file
  restore: tf.Operation


def build_restorer(
  pods: Sequence[Mapping[str, Sequence[Slice]]], client: str
) -> Restorer:
  """Builds the operations that restore the variables of all pods.

  Args:
    pods: slices of each pod, by checkpoint name, alike in all pods.
    client: device of the process that reads the file.
  """
  with tf.device(client):
    prefix = tf.placeholder(tf.string, [], "checkpoint_prefix")
  assignments, done = [], []
  for key, (first, *_) in pods[0].items():
    with tf.device(client):
      names = tf.constant(first.names)
    # The client reads each part of a variable once, for all devices that hold
    # it: the replicas within a pod, and the counterparts in other pods.
    by_spec = collections.defaultdict(list)
    for slices in pods:
      for part in slices[key]:
        by_spec[part.spec].append(part)
    for parts in by_spec.values():
      # Parts are read one after the other: the client holds two at the most,
      # the one it reads and the one on its way to devices.
      with tf.device(client), tf.control_dependencies(done[:-1]):
        value = _read(prefix, names, parts[0])
      done = [
        *done[-1:],
        tf.group([each.variable.assign(value).op for each in parts]),
      ]
      assignments.append(done[-1])
  return Restorer(prefix, tf.group(assignments))


def _read(prefix: tf.Tensor, names: tf.Tensor, part: Slice) -> tf.Tensor:
  """Returns the value of a slice from a file, padded to its variable."""
  shape, dtype = part.variable.shape.as_list(), part.variable.dtype.base_dtype
  if part.spec is None:  # padding throughout, which no file has
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
  """An operation that writes fed slices to a file."""

  # Without devices and variables: a thread writes while training runs another
  # graph.
  graph: tf.Graph
  prefix: tf.Tensor  # [], string, fed: TensorFlow's prefix of the file
  values: list[tf.Tensor]  # fed with the fetched `slice_values`
  write: tf.Operation


def slice_values(
  slices: Mapping[str, Sequence[Slice]], client: str
) -> list[tf.Tensor]:
  """Returns the values to save on `client`, each part of a variable once."""
  values = []
  for part in _saved(slices):
    value, sizes = part.read(), _saved_sizes(part)
    if value.shape.as_list() != sizes:
      with tf.device(part.near):  # padding does not leave the device
        value = tf.slice(value, [0] * len(sizes), sizes)
    # Pod 0 -> client, a message for each value. A server answers a fetch with
    # one message for all values, whose bytes gRPC counts in 32 bits.
    with tf.device(client):
      values.append(tf.identity(value))
  return values


def build_file_writer(slices: Mapping[str, Sequence[Slice]]) -> FileWriter:
  """Builds the operation that writes the `slice_values` of these slices."""
  saved = _saved(slices)
  with tf.Graph().as_default() as graph:
    prefix = tf.placeholder(tf.string, [], "checkpoint_prefix")
    values = [
      tf.placeholder(part.variable.dtype.base_dtype, _saved_sizes(part))
      for part in saved
    ]
    rows = zip(saved, values, strict=True)
    # A slice is stored as a part of its whole variable, by its spec: programs
    # under any layout, and tf.train.load_checkpoint, read whole variables.
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
  """Returns the sizes of a slice's value without padding, as it is saved."""
  return [*([len(part.names)] if len(part.names) > 1 else []), *part.sizes]
