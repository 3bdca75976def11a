# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Saves the variables of all processes in checkpoints, and restores them.

The files have TensorFlow's own format. Each process writes the slices that it
holds to one file, and the client writes one index of all files. processes.py
says which processes read and write.
"""

import collections
import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.checkpoints.initial_weights import NamedWeights
from palm_mtf.checkpoints.manifest import (
  WEIGHTS,
  Checkpoint,
  FileSeal,
  ReadCheckpoint,
  WriteWeights,
  read_checkpoint,
  reading,
  verify,
)
from palm_mtf.checkpoints.processes import (
  THIS_PROCESS,
  CheckpointProcesses,
  assign_slices,
)
from palm_mtf.checkpoints.weight_files import (
  close_weights,
  open_weights,
  opened_prefix,
  seal_file,
)
from palm_mtf.errors import UserError
from palm_mtf.mesh.processes import Process
from palm_mtf.mesh.session import SERVER_ERRORS
from palm_mtf.mesh.slices import Pods, Slice, pad_to
from palm_mtf.model_dir.atomic_files import as_os_errors

# The errors that TensorFlow raises for a damaged checkpoint file.
_DAMAGE = (
  tf.errors.DataLossError,
  tf.errors.InvalidArgumentError,
  tf.errors.NotFoundError,
  tf.errors.OutOfRangeError,
)
# The start of a TensorFlow error message, up to the line with the reason.
_TRACE = re.compile(r"Graph execution error:.*?\nNode: '[^\n]*\n", re.DOTALL)


class WeightsCopier:
  """Copies all variables to the processes that write checkpoints.

  Training waits only for the copy. Another thread may write the copy to files.
  """

  def __init__(
    self,
    session: tf.Session,
    pods: Pods,
    processes: CheckpointProcesses = THIS_PROCESS,
  ):
    """Adds operations that copy and write all slices to the current graph."""
    writer = build_writer(pods, processes)
    self._copy = session.make_callable(writer.copy)
    self._write = session.make_callable(
      writer.sealed_files, feed_list=[writer.prefix]
    )

  def copy(self) -> WriteWeights:
    """Copies every variable; returns a function that writes the copy."""
    self._copy()
    return self._write_copy

  def _write_copy(self, prefix: str) -> dict[str, FileSeal]:
    """Writes the copy; returns size and hash of each file except the index.

    Raises:
      OSError: the file system cannot write the files.
      tf.errors.OpError: a server failed, so a pod may be lost.
    """
    with as_os_errors(but=SERVER_ERRORS):
      files = self._write(os.path.abspath(prefix))
    for _, _, number in files:
      if number:
        raise OSError(int(number), os.strerror(number))
    name = os.path.basename(prefix)
    return {
      f"{name}.{_data_name(i, len(files))}": (int(size), digest.decode())
      for i, (size, digest, _) in enumerate(files)
    }


class Writer(NamedTuple):
  """Operations that copy variables, and operations that write the copy."""

  copy: list[tf.Operation]
  prefix: tf.Tensor  # [], string, to be fed: TensorFlow's prefix of the files
  # For the file of each process: its size [] int64, hash [] string and error
  # number [] int32. Fetching all of them writes the files.
  sealed_files: list[list[tf.Tensor]]


def build_writer(pods: Pods, processes: CheckpointProcesses) -> Writer:
  """Builds operations that write each variable once, not once per pod."""
  with tf.device(processes.client.device):
    prefix = tf.placeholder(tf.string, [], "checkpoint_prefix")
  shares = assign_slices(pods, processes)
  copies, parts, sealed = [], [], []
  for number, (process, slices) in enumerate(shares.items()):
    values = [_read_into_process(part, process) for part in slices]
    with tf.device(process.device):
      # On CPUs, Stage only holds a reference to the variable's memory. While it
      # is held, the optimizer writes the variable's next value to new memory.
      held = {
        "dtypes": [x.dtype for x in values],
        "shared_name": "palm_mtf_checkpoint",
      }
      with tf.control_dependencies([tf.raw_ops.StageClear(**held)]):
        name = held["shared_name"]
        copies.append(tf.raw_ops.Stage(values=values, shared_name=name))
      part = tf.strings.join([prefix, f"_part_{number}"])
      copied = tf.raw_ops.Unstage(**held)
    for value, x in zip(copied, values, strict=True):
      value.set_shape(x.shape)
    parts.append(part)
    sealed.append(_write_slices(process, part, slices, copied))
  sizes = [size for size, *_ in sealed]
  with tf.device(processes.client.device), tf.control_dependencies(sizes):
    # Writes one index for all files, and renames each file of tensors to a name
    # such as "weights.data-00002-of-00008".
    merged = tf.raw_ops.MergeV2Checkpoints(
      checkpoint_prefixes=tf.stack(parts),
      destination_prefix=prefix,
      delete_old_dirs=False,
    )
  with tf.control_dependencies([merged]):
    # No tf.device here, so that each copy is on the device of its input.
    sealed = [[tf.identity(x) for x in each] for each in sealed]
  return Writer(copies, prefix, sealed)


def _read_into_process(part: Slice, process: Process) -> tf.Tensor:
  """Returns a slice's value without padding, copied to a process's CPU."""
  value = part.read()
  sizes = [*([len(part.names)] if len(part.names) > 1 else []), *part.sizes]
  if value.shape.as_list() != sizes:
    with tf.device(part.near):  # so that padding does not leave the device
      value = tf.slice(value, [0] * len(sizes), sizes)
  # Send each value in a separate message, because gRPC limits message sizes.
  with tf.device(process.device):
    return tf.identity(value)


def _write_slices(
  process: Process,
  prefix: tf.Tensor,
  slices: Sequence[Slice],
  values: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
  """Writes slices to a file in a process; returns `seal_file`'s results."""
  with tf.device(process.device):
    rows = zip(slices, values, strict=True)
    # The specs say which part of the variable each slice is. Thus
    # tf.train.load_checkpoint, and programs with another layout, can read the
    # whole variable.
    write = tf.raw_ops.SaveV2(
      prefix=prefix,
      tensor_names=[name for part in slices for name in part.names],
      shape_and_slices=[part.spec for part in slices for _ in part.names],
      tensors=[row for part, value in rows for row in part.rows(value)],
    )
    with tf.control_dependencies([write]):
      path = tf.strings.join([prefix, f".{_data_name(0, 1)}"])
  return process.call(seal_file, [path], [tf.int64, tf.string, tf.int32])


def _data_name(number: int, count: int) -> str:
  """Returns TensorFlow's suffix for tensor file `number` of `count`."""
  return f"data-{number:05d}-of-{count:05d}"


def restore(
  session: tf.Session,
  pods: Pods,
  prefix: str,
  processes: CheckpointProcesses = THIS_PROCESS,
) -> None:
  """Restores the variables of a session from the files of `prefix`.

  Each of `processes` reads the files for its own devices.

  Raises:
    OSError: a process cannot open a file.
  """
  with open_to_restore(session, prefix, processes) as restore_some:
    restore_some(pods)


@contextlib.contextmanager
def open_to_restore(
  session: tf.Session,
  prefix: str,
  processes: CheckpointProcesses = THIS_PROCESS,
) -> Iterator[Callable[[Pods], None]]:
  """Opens files; yields a function that restores the given variables from them.

  For arguments and errors see `restore`.
  """
  prefix = os.path.abspath(prefix)
  with _open_in_processes(
    session, prefix, {process: [] for process in processes.all}
  ):
    yield lambda pods: session.run(build_restorer(pods, prefix, processes))


def whole_reader(
  session: tf.Session, processes: CheckpointProcesses
) -> ReadCheckpoint:
  """Returns a function like `read_whole`; `processes` share the hashing."""

  def read(path: str) -> Checkpoint:
    checkpoint, count = read_checkpoint(path), len(processes.all)
    prefix = os.path.abspath(checkpoint.prefix)
    names = sorted(checkpoint.files)
    shares = {x: names[i::count] for i, x in enumerate(processes.all)}
    with (
      session.graph.as_default(),
      reading(path, WEIGHTS),
      _open_in_processes(session, prefix, shares) as hashes,
    ):
      return verify(checkpoint, hashes)

  return read


@contextlib.contextmanager
def _open_in_processes(
  session: tf.Session, prefix: str, shares: Mapping[Process, Sequence[str]]
) -> Iterator[dict[str, str]]:
  """Opens weights in every process; yields {name of a file: its hash}.

  `shares` says which files each process hashes. Raises OSError if a process
  cannot read a file.
  """
  hashes: dict[str, str] = {}
  opened, closed = [], []
  for process, names in shares.items():
    texts = tf.constant(list(names), tf.string, [len(names)])
    opened.append(
      process.call(open_weights, [prefix, texts], [tf.string, tf.int32])
    )
    closed += process.call(close_weights, [prefix], [tf.int32])
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
  processes: CheckpointProcesses,
) -> None:
  """Restores parameters from INIT_CHECKPOINT, which the client reads.

  Raises:
    UserError: the file is damaged.
  """
  try:
    restore(session, pods, weights.prefix, processes.client_only)
  # Errors of the session, such as those of a lost pod, pass to the caller.
  except _DAMAGE as error:
    # The message begins with the place in our code that made the operation, and
    # ends with the operation. Show only the reason between them.
    reason = _TRACE.sub("", error.message).splitlines()[0]
    raise UserError(
      f"{weights.given}: TensorFlow cannot read it: {reason}"
    ) from None


def build_restorer(
  pods: Pods, prefix: str, processes: CheckpointProcesses
) -> tf.Operation:
  """Builds the operation that restores the variables of all pods.

  All `processes` have opened the files of `prefix`; each reads them for its own
  devices.
  """
  prefixes = {
    process.device: tf.ensure_shape(
      process.call(opened_prefix, [prefix], [tf.string])[0], []
    )
    for process in processes.all
  }
  assignments = []
  # The last two assignments that were built for each process.
  done: dict[str, list[tf.Operation]] = {x.device: [] for x in processes.all}
  for key in pods[0]:
    # A process reads each part of a variable only once, for all of the devices
    # of that process that hold the part.
    parts_of = collections.defaultdict(list)
    for slices in pods:
      for part in slices[key]:
        parts_of[processes.of(part).device, part.spec].append(part)
    for (device, _), parts in parts_of.items():
      # A read waits until the part before the previous part is assigned, so
      # that a process holds at most two parts: one that it reads, and one that
      # it sends to devices.
      with tf.device(device), tf.control_dependencies(done[device][:-1]):
        value = _read_slice(prefixes[device], parts[0])
      assigned = tf.group([each.variable.assign(value).op for each in parts])
      done[device] = [*done[device][-1:], assigned]
      assignments.append(assigned)
  return tf.group(assignments)


def _read_slice(prefix: tf.Tensor, part: Slice) -> tf.Tensor:
  """Reads a slice from the files, and pads it to the shape of its variable."""
  shape, dtype = part.variable.shape.as_list(), part.variable.dtype.base_dtype
  if part.spec is None:  # only padding, which no file has
    return tf.zeros(shape, dtype)
  num = len(part.names)
  values = tf.raw_ops.RestoreV2(
    prefix=prefix,
    tensor_names=tf.constant(part.names),
    shape_and_slices=tf.fill([num], part.spec),
    dtypes=[dtype] * num,
  )
  value = part.stack_rows([tf.ensure_shape(x, part.sizes) for x in values])
  return pad_to(value, shape)


def array_reader(prefix: str) -> Callable[[str], np.ndarray]:
  """Returns a function from the name of a variable to its value."""
  return tf.train.load_checkpoint(prefix).get_tensor


def write_arrays(prefix: str, arrays: Mapping[str, np.ndarray]) -> None:
  """Writes float32 arrays, by variable name, as a TensorFlow checkpoint.

  Raises:
    OSError: the files cannot be written.
  """
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
