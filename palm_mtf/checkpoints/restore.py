# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Variables are restored from checkpoints slice by slice, by every host.

file_hosts.py says which hosts read files, weights_copier.py writes them.
"""

import collections
import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from palm_mtf._tf import tf
from palm_mtf.checkpoints.file_hosts import LOCAL_FILES, FileHosts
from palm_mtf.checkpoints.host_files import (
  close_weights,
  open_weights,
  opened_prefix,
)
from palm_mtf.checkpoints.locate import NamedWeights
from palm_mtf.checkpoints.manifest import (
  WEIGHTS,
  Checkpoint,
  ReadCheckpoint,
  read_checkpoint,
  reading,
  verified,
)
from palm_mtf.errors import UserError
from palm_mtf.mesh.processes import Process
from palm_mtf.mesh.slices import Pods, Slice, padded

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
  pods: Pods,
  prefix: str,
  hosts: FileHosts = LOCAL_FILES,
) -> None:
  """Restores the variables of a session from files.

  Args:
    session: session of the current graph.
    pods: slices of each pod, by checkpoint name.
    prefix: TensorFlow's prefix of the files.
    hosts: hosts that read them.

  Raises:
    OSError: a host cannot open them.
  """
  with opened_to_restore(session, prefix, hosts) as restore_some:
    restore_some(pods)


@contextlib.contextmanager
def opened_to_restore(
  session: tf.Session, prefix: str, hosts: FileHosts = LOCAL_FILES
) -> Iterator[Callable[[Pods], None]]:
  """Opens files; yields a function that restores some variables from them.

  Args:
    session: session of the current graph.
    prefix: TensorFlow's prefix of the files.
    hosts: hosts that read them.

  Raises:
    OSError: a host cannot open them.
  """
  prefix = os.path.abspath(prefix)
  with _opened(session, prefix, {host: [] for host in hosts.all}):
    yield lambda pods: session.run(build_restorer(pods, prefix, hosts))


def whole_reader(session: tf.Session, hosts: FileHosts) -> ReadCheckpoint:
  """Returns a function that reads a checkpoint if all its hashes are right.

  Args:
    session: session that reaches the hosts.
    hosts: hosts that hash the files, each its share of them.
  """

  def read(path: str) -> Checkpoint:
    checkpoint, count = read_checkpoint(path), len(hosts.all)
    prefix = os.path.abspath(checkpoint.prefix)
    names = sorted(checkpoint.files)
    shares = {x: names[i::count] for i, x in enumerate(hosts.all)}
    with (
      session.graph.as_default(),
      reading(path, WEIGHTS),
      _opened(session, prefix, shares) as hashes,
    ):
      return verified(checkpoint, hashes)

  return read


@contextlib.contextmanager
def _opened(
  session: tf.Session, prefix: str, shares: Mapping[Process, Sequence[str]]
) -> Iterator[dict[str, str]]:
  """Opens weights on hosts; yields the hash of each file, by its name.

  Args:
    session: session that reaches the hosts.
    prefix: TensorFlow's prefix of the files.
    shares: names of the files that each host hashes.

  Raises:
    OSError: a host cannot read a file.
  """
  hashes: dict[str, str] = {}
  opened, closed = [], []
  for host, names in shares.items():
    texts = tf.constant(list(names), tf.string, [len(names)])
    opened.append(
      host.call(open_weights, [prefix, texts], [tf.string, tf.int32])
    )
    closed += host.call(close_weights, [prefix], [tf.int32])
  try:
    answers = session.run(opened)
    for names, (found, number) in zip(shares.values(), answers, strict=True):
      if number:
        raise OSError(int(number), os.strerror(number), prefix)
      hashes |= zip(names, map(bytes.decode, found), strict=True)
    yield hashes
  finally:
    session.run(closed)


def restore_weights(
  session: tf.Session,
  pods: Pods,
  weights: NamedWeights,
  hosts: FileHosts,
) -> None:
  """Restores parameters from the weights of another run, as `restore` does.

  Raises:
    UserError: the file is damaged.
  """
  try:
    restore(session, pods, weights.prefix, hosts.client_alone)
  except _DAMAGE as error:  # other errors are of the session: a pod may be lost
    raise UserError(
      f"{weights.given}: TensorFlow cannot read it: {_reason(error)}"
    ) from None


def _reason(error: tf.errors.OpError) -> str:
  """Returns the line of TensorFlow's message that says what is wrong."""
  # Before it are "Graph execution error:" and the operation's place in our
  # code, behind it the operation again.
  return _TRACE.sub("", error.message).splitlines()[0]


def build_restorer(pods: Pods, prefix: str, hosts: FileHosts) -> tf.Operation:
  """Builds the operation that restores the variables of all pods.

  Args:
    pods: slices of each pod, by checkpoint name, alike in all pods.
    prefix: prefix of weights that all hosts have opened.
    hosts: hosts that read them.
  """
  prefixes = {
    host.device: tf.ensure_shape(
      host.call(opened_prefix, [prefix], [tf.string])[0], []
    )
    for host in hosts.all
  }
  assignments = []
  # The last two assignments of each host.
  done: dict[str, list[tf.Operation]] = {x.device: [] for x in hosts.all}
  for key in pods[0]:
    # A host reads each part of a variable once, for all devices that hold it
    # and that it reads for.
    parts_of = collections.defaultdict(list)
    for slices in pods:
      for part in slices[key]:
        parts_of[hosts.of(part).device, part.spec].append(part)
    for (device, _), parts in parts_of.items():
      # Parts are read one after the other: a host holds two at the most, the
      # one it reads and the one on its way to devices.
      with tf.device(device), tf.control_dependencies(done[device][:-1]):
        value = _read(prefixes[device], parts[0])
      assigned = tf.group([each.variable.assign(value).op for each in parts])
      done[device] = [*done[device][-1:], assigned]
      assignments.append(assigned)
  return tf.group(assignments)


def _read(prefix: tf.Tensor, part: Slice) -> tf.Tensor:
  """Returns the value of a slice from a file, padded to its variable."""
  shape, dtype = part.variable.shape.as_list(), part.variable.dtype.base_dtype
  if part.spec is None:  # padding throughout, which no file has
    return tf.zeros(shape, dtype)
  num = len(part.names)
  values = tf.raw_ops.RestoreV2(
    prefix=prefix,
    tensor_names=tf.constant(part.names),
    shape_and_slices=tf.fill([num], part.spec),
    dtypes=[dtype] * num,
  )
  value = part.of_rows([tf.ensure_shape(x, part.sizes) for x in values])
  return padded(value, shape)
