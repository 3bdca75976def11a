# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Variables are copied, and the copy is written slice by slice by every host.

The format is TensorFlow's own: each host writes a file of its slices, and the
client makes one index of all files. file_hosts.py says which hosts write.
"""

import dataclasses
import errno
import os
from collections.abc import Sequence

from palm_mtf._tf import tf
from palm_mtf.checkpoints.file_hosts import (
  LOCAL_FILES,
  FileHosts,
  slices_to_write,
)
from palm_mtf.checkpoints.host_files import seal_file
from palm_mtf.checkpoints.manifest import FileSeal, WriteWeights
from palm_mtf.mesh.processes import Process
from palm_mtf.mesh.session import TASK_ERRORS
from palm_mtf.mesh.slices import Pods, Slice


class WeightsCopier:
  """Copies the variables of a program to its hosts, which write the copy.

  Training waits for the copy alone; the copy is written from any thread.
  """

  def __init__(
    self,
    session: tf.Session,
    pods: Pods,
    hosts: FileHosts = LOCAL_FILES,
  ):
    """Adds copies and writes of all slices to the current graph.

    Args:
      session: session of the current graph.
      pods: slices of each pod, by checkpoint name, with the same bits in all.
      hosts: hosts that write.
    """
    writer = build_writer(pods, hosts)
    self._copy = session.make_callable(writer.copy)
    self._write = session.make_callable(
      writer.sealed_files, feed_list=[writer.prefix]
    )

  def copy(self) -> WriteWeights:
    """Copies every variable; returns a function that writes the copy."""
    self._copy()
    return self._write_copy

  def _write_copy(self, prefix: str) -> dict[str, FileSeal]:
    """Writes the copy under TensorFlow's prefix, while the session is open.

    Returns:
      Size and hash of each file, by its name; not of the index.

    Raises:
      OSError: the disk refuses.
      tf.errors.OpError: a pod may be lost.
    """
    try:
      files = self._write(os.path.abspath(prefix))
    except TASK_ERRORS:
      raise
    except tf.errors.ResourceExhaustedError as error:  # no space left
      raise OSError(errno.ENOSPC, error.message) from error
    except tf.errors.OpError as error:
      raise OSError(errno.EIO, error.message) from error
    for _, _, number in files:
      if number:
        raise OSError(int(number), os.strerror(number))
    name = os.path.basename(prefix)
    return {
      f"{name}.{_data_name(i, len(files))}": (int(size), digest.decode())
      for i, (size, digest, _) in enumerate(files)
    }


@dataclasses.dataclass(frozen=True)
class Writer:
  """Operations that copy variables, and write the copy into files."""

  copy: list[tf.Operation]
  prefix: tf.Tensor  # [], string, fed: TensorFlow's prefix of the files
  # Size [] int64, hash [] string and error number [] int32 of each host's file;
  # fetched together, they write.
  sealed_files: list[list[tf.Tensor]]


def build_writer(pods: Pods, hosts: FileHosts) -> Writer:
  """Builds the operations that write the variables of all pods, once.

  Args:
    pods: slices of each pod, by checkpoint name, with the same bits in all.
    hosts: hosts that write.
  """
  with tf.device(hosts.client.device):
    prefix = tf.placeholder(tf.string, [], "checkpoint_prefix")
  shares = slices_to_write(pods, hosts)
  copies, parts, sealed = [], [], []
  for number, (host, slices) in enumerate(shares.items()):
    values = [_value(part, host) for part in slices]
    with tf.device(host.device):
      # The copy is a reference where the CPU computes: an update makes new
      # memory for its value, as long as the old one is held.
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
    sealed.append(_written(host, part, slices, copied))
  sizes = [size for size, *_ in sealed]
  with tf.device(hosts.client.device), tf.control_dependencies(sizes):
    # One index of all files, which are renamed: ".data-00002-of-00008".
    merged = tf.raw_ops.MergeV2Checkpoints(
      checkpoint_prefixes=tf.stack(parts),
      destination_prefix=prefix,
      delete_old_dirs=False,
    )
  with tf.control_dependencies([merged]):
    # Beside where they are, for their devices are others.
    sealed = [[tf.identity(x) for x in each] for each in sealed]
  return Writer(copies, prefix, sealed)


def _value(part: Slice, host: Process) -> tf.Tensor:
  """Returns the value of a slice on the host that writes it."""
  value, sizes = part.read(), _saved_sizes(part)
  if value.shape.as_list() != sizes:
    with tf.device(part.near):  # padding does not leave the device
      value = tf.slice(value, [0] * len(sizes), sizes)
  # To another process each value goes in a message of its own: gRPC counts the
  # bytes of one in 32 bits.
  with tf.device(host.device):
    return tf.identity(value)


def _written(
  host: Process,
  prefix: tf.Tensor,
  slices: Sequence[Slice],
  values: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
  """Writes slices on a host; returns what `seal_file` says of the file."""
  with tf.device(host.device):
    rows = zip(slices, values, strict=True)
    # A slice is stored as a part of its whole variable, by its spec: programs
    # under any layout, and tf.train.load_checkpoint, read whole variables.
    write = tf.raw_ops.SaveV2(
      prefix=prefix,
      tensor_names=[name for part in slices for name in part.names],
      shape_and_slices=[part.spec for part in slices for _ in part.names],
      tensors=[row for part, value in rows for row in part.rows(value)],
    )
    with tf.control_dependencies([write]):
      path = tf.strings.join([prefix, f".{_data_name(0, 1)}"])
  return host.call(seal_file, [path], [tf.int64, tf.string, tf.int32])


def _data_name(number: int, count: int) -> str:
  """Returns TensorFlow's suffix of a file of tensors."""
  return f"data-{number:05d}-of-{count:05d}"


def _saved_sizes(part: Slice) -> list[int]:
  """Returns the sizes of a slice's value without padding, as it is saved."""
  return [*([len(part.names)] if len(part.names) > 1 else []), *part.sizes]
