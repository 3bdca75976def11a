# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Saves the variables of all processes in checkpoints, and restores them.

The files have TensorFlow's own format. Each process writes the slices that it
holds to one file, and the client writes one index of all files. If all servers
of a run see the folder of its checkpoints, each server reads and writes the
slices on its devices. Otherwise the client reads and writes all.
"""

import collections
import contextlib
import dataclasses
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.checkpoints.adapter_base import with_base
from palm_mtf.checkpoints.manifest import (
  WEIGHTS,
  Checkpoint,
  FileSeal,
  WriteWeights,
  close_weights,
  find_opened_prefix,
  make_empty_file,
  open_weights,
  read_checkpoint,
  reading,
  seal_file,
  verify,
)
from palm_mtf.checkpoints.named_weights import NamedWeights
from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.mesh.session import SERVER_ERRORS
from palm_mtf.mesh.slices import (
  Pods,
  Slice,
  cpu_of_process,
  pad_to,
  variables_of,
)
from palm_mtf.model_dir.atomic_files import PARTIAL, as_os_errors, writing
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.processes import Process
from palm_mtf.runtime.program import Program, state_of

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CheckpointProcesses:
  """The processes that read and write the checkpoints of a session."""

  # The client, which reads and writes everything if `servers` is empty.
  client: Process
  # Servers of all devices, by the name of the server's CPU device.
  servers: Mapping[str, Process] = dataclasses.field(default_factory=dict)

  @property
  def all(self) -> list[Process]:
    """The servers, or the client if there are no servers."""
    return list(self.servers.values()) or [self.client]

  def of(self, part: Slice) -> Process:
    """Returns the process that restores a slice, and may have to save it."""
    return self.servers.get(cpu_of_process(part.near), self.client)


# For a run whose devices are in this process, without servers.
THIS_PROCESS = CheckpointProcesses(Process("/device:cpu:0"))


def find_checkpoint_processes(
  client: Client, this: Process, servers: Sequence[Process], folder: str
) -> CheckpointProcesses:
  """Returns the processes that read and write the checkpoints in a folder.

  These are the servers if all of them share the folder, otherwise the client. A
  missing folder is made. `servers` is empty if the client has the devices.
  """
  if not servers:
    return CheckpointProcesses(this)
  # Each server makes a file in a temporary folder. If the client does not find
  # the file, that server does not share the folder.
  with writing(folder, None):
    os.makedirs(folder, exist_ok=True)
    common = tempfile.mkdtemp(prefix=PARTIAL, dir=os.path.abspath(folder))
  try:
    with client.graph.as_default():
      made = [
        server.call(make_empty_file, [os.path.join(common, str(i))], [tf.int32])
        for i, server in enumerate(servers)
      ]
    client.call(Program(outputs=made))
    found = os.listdir(common)
  finally:
    shutil.rmtree(common, ignore_errors=True)
  for number, server in enumerate(servers):
    if str(number) not in found:
      _logger.info(
        f"the client reads and writes checkpoints for all servers: "
        f"{server.device} does not share {folder}"
      )
      return CheckpointProcesses(this)
  return CheckpointProcesses(this, {x.device: x for x in servers})


def assign_slices(
  pods: Pods, processes: CheckpointProcesses
) -> dict[Process, list[Slice]]:
  """Returns {process: slices that it writes}, with bytes that are balanced.

  A region is the part of a variable that a slice holds. Several devices, and
  all pods, may hold a region, but only one process writes it.
  """
  regions = []
  for name in pods[0]:
    holders = collections.defaultdict(dict)
    for slices in pods:
      for part in slices[name]:
        if part.spec is not None:
          holders[part.spec].setdefault(processes.of(part).device, part)
    regions += holders.values()
  # Begin with the largest region. Of the processes that hold a region, the
  # process with the fewest bytes so far gets it.
  num_bytes = {process.device: 0 for process in processes.all}
  found = {process.device: [] for process in processes.all}
  for holders in sorted(regions, key=_count_bytes, reverse=True):
    device = min(holders, key=num_bytes.get)
    num_bytes[device] += _count_bytes(holders)
    found[device].append(holders[device])
  return {x: found[x.device] for x in processes.all if found[x.device]}


def _count_bytes(holders: Mapping[str, Slice]) -> int:
  part = next(iter(holders.values()))
  size = part.variable.dtype.base_dtype.size
  return len(part.names) * math.prod(part.sizes) * size


# The errors that TensorFlow raises for a damaged checkpoint file.
_DAMAGE = (
  tf.errors.DataLossError,
  tf.errors.InvalidArgumentError,
  tf.errors.NotFoundError,
  tf.errors.OutOfRangeError,
)
# Start of TensorFlow's message, up to the operation's name. Messages for users
# leave it out, because only the rest says the reason.
_TRACE = re.compile(r"Graph execution error:.*?\nNode: '[^\n]*\n", re.DOTALL)


class WeightsCopier:
  """Copies all variables to the processes that write checkpoints.

  Training waits only for the copy. Another thread may write the copy to files.
  """

  def __init__(
    self,
    client: Client,
    pods: Pods,
    processes: CheckpointProcesses = THIS_PROCESS,
  ):
    """Builds programs that write each slice once, as pods hold equal bits."""
    self._client = client
    with client.graph.as_default():
      self._copy, self._write = build_writer(pods, processes)

  def copy(self) -> WriteWeights:
    """Copies every variable; returns a function that writes the copy."""
    self._client.call(self._copy)
    return self._write_copy

  def _write_copy(self, prefix: str) -> dict[str, FileSeal]:
    """Writes the copy; returns {file: (bytes, hash)} of all but the index.

    Raises OSError if the file system cannot write the files. Raises
    tf.errors.OpError if a server failed, so a pod may be lost.
    """
    with as_os_errors(but=SERVER_ERRORS):
      files = self._client.call(
        self._write, {"prefix": os.path.abspath(prefix)}
      )
    for _, _, number in files:
      if number:
        raise OSError(int(number), os.strerror(number))
    name = os.path.basename(prefix)
    return {
      f"{name}.{_data_name(i, len(files))}": (int(size), digest.decode())
      for i, (size, digest, _) in enumerate(files)
    }


def build_writer(
  pods: Pods, processes: CheckpointProcesses
) -> tuple[Program, Program]:
  """Builds programs that write each variable once, not once per pod.

  Returns:
    A program that copies the variables, and one that writes the copy. The input
    "prefix" is TensorFlow's prefix of the files. The outputs are, for the file
    of each process, its size [] int64, hash [] string and errno [] int32.
  """
  with tf.device(processes.client.device):
    prefix = tf.placeholder(tf.string, [], "checkpoint_prefix")
  shares = assign_slices(pods, processes)
  copies, parts, sealed = [], [], []
  for number, (process, slices) in enumerate(shares.items()):
    values = [_read_into_process(part, process) for part in slices]
    with tf.device(process.device):
      # On CPUs, Stage copies nothing: it holds a reference to the variable's
      # memory, and the optimizer writes the next value to other memory.
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
    # The identities make a call return only after the index is written. Without
    # tf.device, each identity is on the device of its input.
    sealed = [[tf.identity(x) for x in each] for each in sealed]
  copy = Program(operations=copies, reads=state_of(variables_of(pods)))
  return copy, Program({"prefix": prefix}, sealed)


def _read_into_process(part: Slice, process: Process) -> tf.Tensor:
  """Returns a slice's value, without padding, copied to `process`."""
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
  """Writes slices to a process's file; returns its size, hash and errno."""
  with tf.device(process.device):
    rows = zip(slices, values, strict=True)
    # The specs say which part of the variable each slice is, so that programs
    # with any layout, and tf.train.load_checkpoint, can read the variable.
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


class CheckpointReader:
  """Reads checkpoints into variables; builds the needed programs only once."""

  def __init__(
    self, client: Client, processes: CheckpointProcesses = THIS_PROCESS
  ):
    """Builds the programs by which `processes` open and close files."""
    self._client, self._processes = client, processes
    self._programs: dict[str, Program] = {}  # restores, by variables' names
    with client.graph.as_default(), tf.device(processes.client.device):
      prefix = tf.placeholder(tf.string, [], "checkpoint_prefix")
      names = {
        x.device: tf.placeholder(tf.string, [None], "file_names")
        for x in processes.all
      }
      self._prefix = {"prefix": prefix}
      self._open = Program(
        {**self._prefix, **names},
        [
          x.call(open_weights, [prefix, names[x.device]], [tf.string, tf.int32])
          for x in processes.all
        ],
      )
      self._close = Program(
        self._prefix,
        [x.call(close_weights, [prefix], [tf.int32]) for x in processes.all],
      )

  def restore(self, pods: Pods, prefix: str) -> None:
    """Restores variables from the files of a TensorFlow prefix.

    `pods` has, for each pod, {name in the checkpoint: slices to restore}.
    Raises OSError if a process cannot open a file.
    """
    with self.open(prefix) as restore:
      restore(pods)

  @contextlib.contextmanager
  def open(self, prefix: str) -> Iterator[Callable[[Pods], None]]:
    """Opens files once; yields a function that restores some variables.

    Arguments and errors are as for `restore`.
    """
    prefix = os.path.abspath(prefix)
    with self._opened(prefix, {x: [] for x in self._processes.all}):
      yield lambda pods: self._client.call(
        self._restorer(pods), {"prefix": prefix}
      )

  @contextlib.contextmanager
  def open_model(
    self, checkpoint: Checkpoint, parts: Sequence[Pods] = ()
  ) -> Iterator[Callable[[Pods], None]]:
    """Like `open`, for all parameters, also those of an adapter's base.

    `parts` are the arguments of later calls. Their programs are built now,
    because a session copies its whole graph each time that the graph grows.

    Raises UserError if the base is missing or changed.
    """
    checkpoint = with_base(checkpoint)
    own, base = checkpoint.manifest.shapes, checkpoint.base
    prefixes = [checkpoint.prefix, *([base.prefix] if base else [])]

    def split(pods: Pods) -> Iterator[tuple[str, Pods]]:
      for prefix, is_own in zip(prefixes, (True, False), strict=False):
        some = [
          {key: x for key, x in y.items() if not base or (key in own) == is_own}
          for y in pods
        ]
        if some[0]:
          yield prefix, some

    for pods in parts:
      for _, some in split(pods):
        self._restorer(some)
    with contextlib.ExitStack() as stack:
      readers = {x: stack.enter_context(self.open(x)) for x in prefixes}

      def restore(pods: Pods) -> None:
        for prefix, some in split(pods):
          readers[prefix](some)

      yield restore

  def read_whole(self, path: str) -> Checkpoint:
    """Returns a checkpoint after comparing every file with its hash.

    To save time, each process hashes a share of the files.

    Raises:
      DamagedCheckpointError: a file is missing, truncated or changed.
      UserError: a file cannot be read, or another version wrote the manifest.
    """
    checkpoint = read_checkpoint(path)
    prefix = os.path.abspath(checkpoint.prefix)
    names, count = sorted(checkpoint.files), len(self._processes.all)
    shares = {x: names[i::count] for i, x in enumerate(self._processes.all)}
    with reading(path, WEIGHTS), self._opened(prefix, shares) as hashes:
      return verify(checkpoint, hashes)

  def _restorer(self, pods: Pods) -> Program:
    names = json_text(list(pods[0]))
    if names not in self._programs:
      with self._client.graph.as_default():
        restore = build_restorer(pods, self._prefix["prefix"], self._processes)
      self._programs[names] = Program(
        self._prefix, operations=[restore], writes=state_of(variables_of(pods))
      )
    return self._programs[names]

  @contextlib.contextmanager
  def _opened(
    self, prefix: str, shares: Mapping[Process, Sequence[str]]
  ) -> Iterator[dict[str, str]]:
    """Holds a checkpoint's files open in all processes; yields {file: hash}.

    Args:
      prefix: TensorFlow's prefix of the files.
      shares: for each process, the names of the files that it hashes.

    Raises:
      OSError: a process cannot read a file.
    """
    hashes: dict[str, str] = {}
    names = {x.device: list(share) for x, share in shares.items()}
    try:
      answers = self._client.call(self._open, {"prefix": prefix, **names})
      for share, (found, number) in zip(shares.values(), answers, strict=True):
        if number:
          raise OSError(int(number), os.strerror(number), prefix)
        hashes |= zip(share, map(bytes.decode, found), strict=True)
      yield hashes
    finally:
      self._client.call(self._close, {"prefix": prefix})

  def restore_weights(self, pods: Pods, weights: NamedWeights) -> None:
    """Restores parameters from INIT_CHECKPOINT.

    Raises UserError if the file is damaged.
    """
    try:
      self.restore(pods, weights.prefix)
    # Other errors are about servers or the network; the session reports them.
    except _DAMAGE as error:
      # Without this start, the first line of the message is the reason.
      reason = _TRACE.sub("", error.message).splitlines()[0]
      raise UserError(
        f"{weights.given}: TensorFlow cannot read it: {reason}"
      ) from None


def build_restorer(
  pods: Pods, prefix: tf.Tensor, processes: CheckpointProcesses
) -> tf.Operation:
  """Builds the operation that restores the variables of all pods.

  Args:
    pods: slices of each pod, by name in the checkpoint, the same in all pods.
    prefix: [], string, to be fed: TensorFlow's prefix of files that all
      processes have opened.
    processes: processes that read the files, each for its own devices.
  """
  prefixes = {
    process.device: tf.ensure_shape(
      process.call(find_opened_prefix, [prefix], [tf.string])[0], []
    )
    for process in processes.all
  }
  assignments = []
  # {process: its last two assignments}; its next read waits for the older one.
  done: dict[str, list[tf.Operation]] = {x.device: [] for x in processes.all}
  for key in pods[0]:
    # Devices of a process may hold the same part; read it from the file once.
    parts_of = collections.defaultdict(list)
    for slices in pods:
      for part in slices[key]:
        parts_of[processes.of(part).device, part.spec].append(part)
    for (device, _), parts in parts_of.items():
      # A process holds at most two parts, one being read and one being sent, so
      # a read waits until the part two before it is assigned.
      with tf.device(device), tf.control_dependencies(done[device][:-1]):
        value = read_slice(prefixes[device], parts[0])
      assigned = tf.group(
        [each.variable.assign(value, read_value=False) for each in parts]
      )
      done[device] = [*done[device][-1:], assigned]
      assignments.append(assigned)
  return tf.group(assignments)


def read_slice(prefix: tf.Tensor, part: Slice) -> tf.Tensor:
  """Reads a slice from files, and pads it to the shape of its variable.

  `prefix` is TensorFlow's prefix of the files, [] string.
  """
  shape, dtype = part.variable.shape.as_list(), part.variable.dtype.base_dtype
  if part.spec is None:  # only padding, which no file has
    return tf.zeros(shape, dtype)
  num = len(part.names)
  values = tf.raw_ops.RestoreV2(
    prefix=prefix,
    tensor_names=tf.constant(part.names),
    shape_and_slices=tf.constant([part.spec] * num),
    dtypes=[part.saved_dtype] * num,
  )
  held = part.sizes[1:] if part.is_copied else part.sizes
  values = [tf.ensure_shape(x, held) for x in values]
  if part.is_copied:
    values = [tf.broadcast_to(x, part.sizes) for x in values]
  return pad_to(tf.cast(part.stack_rows(values), dtype), shape)


def array_reader(checkpoint: Checkpoint) -> Callable[[str], np.ndarray]:
  """Returns a function that reads a parameter by name, for exports.

  It also reads the parameters of an adapter's base.
  """
  checkpoint = with_base(checkpoint)
  own = tf.train.load_checkpoint(checkpoint.prefix)
  if not checkpoint.base:
    return own.get_tensor
  of_base = tf.train.load_checkpoint(checkpoint.base.prefix)

  def read(name: str) -> np.ndarray:
    is_own = name in checkpoint.manifest.shapes
    return (own if is_own else of_base).get_tensor(name)

  return read


def write_arrays(prefix: str, arrays: Mapping[str, np.ndarray]) -> None:
  """Writes float32 arrays, by variable name, for exports to TensorFlow.

  Raises OSError if the files cannot be written.
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
