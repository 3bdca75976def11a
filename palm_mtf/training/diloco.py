# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Training steps of pods that exchange parameters seldom, and their syncs.

Between syncs nothing crosses from pod to pod: each pod has its own programs,
and the client runs the pods at the same time.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from palm_mtf._tf import tf
from palm_mtf.config import ExchangeConfig
from palm_mtf.data.batches.corpus import Batch
from palm_mtf.mesh.cpu_gpu import Devices
from palm_mtf.programs.outer import OuterPrograms
from palm_mtf.runtime.client.client import Client, at_same_time
from palm_mtf.training.step import TrainStep


class Syncs:
  """Runs the syncs of a session after the steps that ExchangeConfig names."""

  def __init__(
    self, client: Client, config: ExchangeConfig, programs: OuterPrograms
  ):
    """Takes the client in whose graph `programs` were built."""
    self._client, self._config, self._programs = client, config, programs
    self._pending: concurrent.futures.Future | None = None

  def run(self, step: int) -> None:
    """Starts or ends the sync that is due after `step` steps, if any is."""
    sent = self._config.fragment_sent(step)
    merged = self._config.fragment_after(step)
    if sent is None and not self._pending:
      sent = merged  # training began after the step at which pods send
    if sent is not None:
      self._client.call(self._programs.send[sent])
      # The exchange waits for the network, so it need not wait for its turn on
      # the devices.
      exchange = self._programs.exchange[sent]
      self._pending = self._client.run(exchange, has_turn=True)
    if merged is not None:
      self._pending.result()
      self._pending = None
      self._client.call(self._programs.merge[merged])

  def begin(self) -> None:
    """Sets the outer parameters to the pods' parameters, which are equal."""
    self._client.call(self._programs.begin)

  def drop(self) -> None:
    """Waits for a sync that a rewind has undone, and ignores its result."""
    if self._pending:
      concurrent.futures.wait([self._pending])
      self._pending = None

  @contextlib.contextmanager
  def showing_outer(self) -> Iterator[None]:
    """In the `with` body, all pods have the outer parameters."""
    self._client.call(self._programs.show)
    yield
    self._client.call(self._programs.hide)


class DilocoStep:
  """Runs steps of one batch size on pods that exchange parameters seldom.

  It has the members of `TrainStep`, except `run_loop`.
  """

  def __init__(
    self, steps: Sequence[TrainStep], devices: Devices, syncs: Syncs
  ):
    """Takes a step of each pod, and the devices of all pods."""
    self._steps, self._syncs = steps, syncs
    self.programs = dataclasses.replace(
      steps[0].programs,
      devices=devices,
      batch_size=sum(x.programs.batch_size for x in steps),
      phases={k: y for x in steps for k, y in x.programs.phases.items()},
    )
    # In one process, the first steps of pods run one after another, so that
    # later pods find the code of the first one in XLA's cache.
    self._is_first = "/job:" not in devices.client
    self.showing_outer = syncs.showing_outer

  def run(
    self,
    batch: Batch | str,
    step: int,
    records: list[tf.RunMetadata] | None = None,
  ) -> dict[str, float]:
    """Trains on a batch; returns the means of the pods' metrics, by name.

    For arguments and errors see `TrainStep`.
    """
    calls = [
      functools.partial(x.run, rows, step, records)
      for x, rows in self._cut(batch)
    ]
    # A process can do only one full trace at a time.
    in_turn = self._is_first or records is not None
    self._is_first = False
    found = [x() for x in calls] if in_turn else at_same_time(calls)
    self._syncs.run(step + 1)
    return {x: sum(y[x] for y in found) / len(found) for x in found[0]}

  def losses(self, batch: Batch) -> Iterator[Sequence[float]]:
    """Yields what `TrainStep.losses` yields, pod after pod."""

    def find(step: TrainStep, rows: Batch) -> list[Sequence[float]]:
      return [*step.losses(rows)]

    for of_pod in at_same_time(
      functools.partial(find, *x) for x in self._cut(batch)
    ):
      yield from of_pod

  def _cut(self, batch: Batch | str) -> Iterator[tuple[TrainStep, Any]]:
    """Yields each pod's step and rows; a text is the same for all pods."""
    for pod, x in enumerate(self._steps):
      rows, size = batch, x.programs.batch_size
      if not isinstance(batch, str):
        part = slice(pod * size, (pod + 1) * size)
        rows = {name: each[part] for name, each in batch.items()}
      yield x, rows
