# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Where buffers are: a store per device and dtype, from keys to shards.

A call may be sent before its inputs exist. It must not wait in MapPeek, which
blocks a thread of the server, and blocks it forever if the client is killed. So
it waits for a signal, by Unbatch, which needs no thread and has a time limit.
"""

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from palm_mtf._tf import tf
from palm_mtf.mesh.slices import cpu_of_process
from palm_mtf.runtime.program import Program
from palm_mtf.runtime.tracer.shards import Sharding, Shards

# A call that waits for longer fails with DeadlineExceededError, so that servers
# soon forget the calls and buffers of a client that was killed.
WAIT_SECS = 5.0


class Tickets:
  """Operations on the buffers of a call, which rows of numbers describe.

  A row has the key of a buffer and the number of its signal, which is negative
  if the call need not wait for the signal. The last row has a number of the
  call.

  Attributes:
    placeholders: placeholder of the rows, [buffers + 1, 2] int64, by the CPU of
      each process.
  """

  def __init__(self, held: Sequence[Sharding]):
    self._held = held
    self.placeholders: dict[str, tf.Tensor] = {}
    self._rows: dict[tuple[str, int], list[tf.Tensor]] = {}
    # By the CPU of a process, so that no process waits for another.
    self._waits: dict[str, list[tf.Operation]] = collections.defaultdict(list)
    self._staged: dict[str, list[tf.Operation]] = collections.defaultdict(list)

  def wait(self, row: int) -> None:
    """Takes a buffer's signal in each process, before `peek` and `stage`."""
    for cpu in self._find_cpus([row]):
      with tf.device(cpu):
        _, signal = self._read_row(cpu, row)
        # Unbatch waits unless its index has the signal.
        can_start = tf.cast(signal < 0, tf.int32)
        signal = tf.abs(signal)
        index = tf.fill([can_start, 1], tf.ones([], tf.int64))
        wait = _unbatch([0], index * [[signal, 0, 1]], signal)
      self._waits[cpu].append(wait)

  def signal(self, rows: Iterable[int]) -> list[tf.Operation]:
    """Gives the signals of buffers in each process, after `stage`."""
    given = []
    for cpu in self._find_cpus(rows):
      every = [*rows, len(self._held)]
      with tf.device(cpu), tf.control_dependencies(self._staged[cpu]):
        signals = [tf.abs(self._read_row(cpu, x)[1]) for x in every]
        index = [[x, i, i + 1] for i, x in enumerate(signals)]
        given.append(_unbatch([0] * len(every), index, signals[-1]))
    return given

  def stage(self, row: int, shards: Shards) -> None:
    """Stores shards, after `wait`, unless their key is in the store."""
    for shard, (device, store) in zip(
      shards, self._find_stores(row), strict=True
    ):
      cpu = cpu_of_process(device)
      with tf.device(device), tf.control_dependencies(self._waits[cpu]):
        staged = tf.raw_ops.MapStage(values=[shard], **store)
      self._staged[cpu].append(staged)

  def peek(self, row: int) -> Shards:
    """Returns the shards of a buffer, after `wait`."""
    shards = []
    for device, store in self._find_stores(row):
      waits = self._waits[cpu_of_process(device)]
      with tf.device(device), tf.control_dependencies(waits):
        (shard,) = tf.raw_ops.MapPeek(**store)
      shard.set_shape(self._held[row].sizes)
      shards.append(shard)
    return shards

  def _find_stores(self, row: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each device, and which entry of its store has the shard."""
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
  """Builds a program that removes buffers, which rows of numbers describe.

  A row has the key of a buffer and the number of its signal. If there is no
  shard or signal, because a program has failed, the program does not wait.
  """
  rows: dict[str, tf.Tensor] = {}  # by the CPU of each process
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
