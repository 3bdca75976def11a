# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Virtual slices, how their devices hold arrays, and where buffers are.

Each device has one store per dtype, which maps keys to shards. A call may be
sent before its inputs exist. It must not wait in MapPeek, the operation that
reads a store: that would block a thread of the server, permanently if the
client is killed. Instead it waits in the operation Unbatch, which blocks no
thread and has a time limit. There it waits for a signal, a number that the call
which stores the input gives to Unbatch.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from palm_mtf._tf import tf
from palm_mtf.errors import UserError
from palm_mtf.mesh.slices import cpu_of_process
from palm_mtf.runtime.program import Program

Shards = list[tf.Tensor]  # parts of an array, one for each device of a slice


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity, as a key
class VirtualSlice:
  """Logical devices, which a client asked for by the shape of their mesh."""

  mesh_shape: str  # mesh axes and their sizes, "x:2,y:2"
  owner: Any = dataclasses.field(repr=False)  # the client that has the slice
  # For each logical device, TensorFlow's name of the device that it uses.
  devices: Sequence[str] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Sharding:
  """How a slice holds an array: each device has a region of it, its shard."""

  slice: VirtualSlice
  shape: tuple[int, ...]  # shape of the whole array
  dtype: tf.DType
  sizes: tuple[int, ...]  # shape of a shard
  begins: tuple[tuple[int, ...], ...]  # first indices of each device's region

  @property
  def shard_bytes(self) -> int:
    """Bytes of a shard."""
    return math.prod(self.sizes) * self.dtype.size

  def count_bytes(self, num_arrays: int) -> dict[str, int]:
    """Returns {device: bytes of its shards of `num_arrays` such arrays}."""
    return dict.fromkeys(self.slice.devices, num_arrays * self.shard_bytes)

  @property
  def regions(self) -> list[tuple[slice, ...]]:
    """For each device, the slices that cut its shard out of the whole array."""
    return [
      tuple(slice(x, x + n) for x, n in zip(begin, self.sizes, strict=True))
      for begin in self.begins
    ]


def split_rows(
  slice_: VirtualSlice, shape: Sequence[int], dtype: tf.DType, name: str
) -> Sharding:
  """Gives each device equally many rows of an array, or a copy of a scalar.

  Raises UserError, which says `name`, if the rows cannot be divided equally.
  """
  n = len(slice_.devices)
  if not shape:
    return Sharding(slice_, (), dtype, (), ((),) * n)
  rows, rest = divmod(shape[0], n)
  if rest or not rows:
    raise UserError(
      f"{name} has {shape[0]} rows, which the {n} devices of slice "
      f'"{slice_.mesh_shape}" cannot share equally; give a multiple of {n}.'
    )
  begins = tuple((i * rows, *[0] * len(shape[1:])) for i in range(n))
  return Sharding(slice_, tuple(shape), dtype, (rows, *shape[1:]), begins)


def move(shards: Shards, held: Sharding, wanted: Sharding) -> Shards:
  """Sends an array to the devices of another sharding.

  If both shardings have equal regions, device i sends to device i.
  """
  moved = []
  for i, device in enumerate(wanted.slice.devices):
    # If several devices hold equal shards, the last in this order sends.
    order = sorted(range(len(shards)), key=lambda j, i=i: j == i)
    senders = {held.begins[j]: shards[j] for j in order}
    with tf.device(device):
      moved.append(_join(senders, held.sizes, wanted.begins[i], wanted.sizes))
  return moved


def _join(
  shards: dict[tuple[int, ...], tf.Tensor],
  held: tuple[int, ...],
  begin: tuple[int, ...],
  sizes: tuple[int, ...],
  first: tuple[int, ...] = (),
) -> tf.Tensor:
  """Returns the region of an array from `begin` with shape `sizes`.

  `shards` is {first indices: shard of shape `held`}. A recursive call joins the
  shards whose first indices in the leading dimensions are `first`.
  """
  dim = len(first)
  if dim == len(sizes):
    if (first, held) == (begin, sizes):
      return shards[first]
    cuts = zip(begin, sizes, first, strict=True)
    return shards[first][
      tuple(slice(max(0, x - y), x + n - y) for x, n, y in cuts)
    ]
  parts = [
    _join(shards, held, begin, sizes, (*first, x))
    for x in sorted({each[dim] for each in shards})
    if x < begin[dim] + sizes[dim] and begin[dim] < x + held[dim]
  ]
  return parts[0] if len(parts) == 1 else tf.concat(parts, dim)


# A call that waits longer for a signal fails with DeadlineExceededError, so
# servers soon forget the calls and buffers of a client that was killed.
WAIT_SECS = 5.0


class Tickets:
  """Makes operations by which a call waits for, reads and stores buffers.

  Each call feeds a matrix with a row per buffer: the buffer's key in the
  stores, and the number of its signal, negative if the call need not wait for
  the signal. The last row has 0 and a number that is unique to the call.
  """

  def __init__(self, held: Sequence[Sharding]):
    self._held = held
    # {CPU of a process: placeholder of the rows, [buffers + 1, 2] int64}
    self.placeholders: dict[str, tf.Tensor] = {}
    self._rows: dict[tuple[str, int], list[tf.Tensor]] = {}
    # {CPU of a process: its operations that wait for signals, or that store
    # shards}. A later operation waits only for those of the same process.
    self._waits: dict[str, list[tf.Operation]] = collections.defaultdict(list)
    self._staged: dict[str, list[tf.Operation]] = collections.defaultdict(list)

  def wait(self, row: int) -> None:
    """Makes reads and stores, if added later, wait for a buffer's signal."""
    for cpu in self._find_cpus([row]):
      with tf.device(cpu):
        _, signal = self._read_row(cpu, row)
        # Unbatch waits until some Unbatch has its number in `batch_index`. If
        # `signal` is negative, this Unbatch has it, and so it does not wait.
        can_start = tf.cast(signal < 0, tf.int32)
        signal = tf.abs(signal)
        index = tf.fill([can_start, 1], tf.ones([], tf.int64))
        wait = _unbatch([0], index * [[signal, 0, 1]], signal)
      self._waits[cpu].append(wait)

  def signal(self, rows: Iterable[int]) -> list[tf.Operation]:
    """Returns operations that send buffers' signals once shards are stored."""
    given = []
    for cpu in self._find_cpus(rows):
      every = [*rows, len(self._held)]
      with tf.device(cpu), tf.control_dependencies(self._staged[cpu]):
        signals = [tf.abs(self._read_row(cpu, x)[1]) for x in every]
        index = [[x, i, i + 1] for i, x in enumerate(signals)]
        given.append(_unbatch([0] * len(every), index, signals[-1]))
    return given

  def stage(self, row: int, shards: Shards) -> None:
    """Stores a buffer's shards, unless the call is repeated and has done so."""
    for shard, (device, store) in zip(
      shards, self._find_stores(row), strict=True
    ):
      cpu = cpu_of_process(device)
      with tf.device(device), tf.control_dependencies(self._waits[cpu]):
        staged = tf.raw_ops.MapStage(values=[shard], **store)
      self._staged[cpu].append(staged)

  def peek(self, row: int) -> Shards:
    """Returns a buffer's shards, read after the signals that `wait` awaits."""
    shards = []
    for device, store in self._find_stores(row):
      waits = self._waits[cpu_of_process(device)]
      with tf.device(device), tf.control_dependencies(waits):
        (shard,) = tf.raw_ops.MapPeek(**store)
      shard.set_shape(self._held[row].sizes)
      shards.append(shard)
    return shards

  def _find_stores(self, row: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (device, arguments of MapStage and MapPeek for its shard)."""
    held = self._held[row]
    for device in held.slice.devices:
      key, _ = self._read_row(cpu_of_process(device), row)
      yield device, _store(held, key)

  def _find_cpus(self, rows: Iterable[int]) -> list[str]:
    devices = (x for row in rows for x in self._held[row].slice.devices)
    return [*dict.fromkeys(map(cpu_of_process, devices))]

  def _read_row(self, cpu: str, row: int) -> list[tf.Tensor]:
    with tf.device(cpu), tf.control_dependencies(None):
      if cpu not in self.placeholders:
        shape = [len(self._held) + 1, 2]
        self.placeholders[cpu] = tf.placeholder(tf.int64, shape)
      if (cpu, row) not in self._rows:
        self._rows[cpu, row] = tf.unstack(self.placeholders[cpu][row])
    return self._rows[cpu, row]


def build_removal(held: Sharding) -> Program:
  """Builds a program that removes buffers and their signals from the stores.

  A call feeds a row per buffer: its key and its signal's number. If a shard or
  signal is missing because a program has failed, the call does not wait.
  """
  rows: dict[str, tf.Tensor] = {}  # placeholders [buffers, 2], by process
  removed = []
  for device in held.slice.devices:
    cpu = cpu_of_process(device)
    has_signals = cpu not in rows
    if has_signals:
      with tf.device(cpu):
        rows[cpu] = tf.placeholder(tf.int64, [None, 2])

    def remove(i, rows=rows[cpu], has_signals=has_signals):
      key, signal = tf.unstack(rows[i])
      done = []
      if has_signals:
        done.append(_unbatch([0], [[signal, 0, 1]], signal))
      empty, store = tf.zeros([0], held.dtype), _store(held, key)
      with tf.control_dependencies(
        [tf.raw_ops.MapStage(values=[empty], **store)]
      ):
        done.append(tf.raw_ops.MapUnstage(**store)[0].op)
      with tf.control_dependencies(done):
        return i + 1

    with tf.device(device):
      number = tf.shape(rows[cpu])[0]
      end = tf.while_loop(lambda i, n=number: i < n, remove, [0])
    removed.append(end.op)
  return Program(rows, operations=removed)


def _store(held: Sharding, key: tf.Tensor) -> dict[str, Any]:
  """Returns the arguments of operations on a shard in the store of a device."""
  name = f"buffers_{held.dtype.name}"
  dtypes = [held.dtype]
  return {"key": key, "indices": [0], "dtypes": dtypes, "shared_name": name}


def _unbatch(data: object, index: object, number: tf.Tensor) -> tf.Operation:
  return tf.raw_ops.Unbatch(
    batched_tensor=data,
    batch_index=index,
    id=number,
    timeout_micros=int(1e6 * WAIT_SECS),
    shared_name="signals",
  ).op
