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
from collections.abc import Callable, Iterator, Sequence

from palm_mtf._tf import tf
from palm_mtf.config import ExchangeConfig, PodsConfig, StepConfig
from palm_mtf.data.batches.corpus import Batch
from palm_mtf.mesh.cpu_gpu import Devices
from palm_mtf.programs.features import ReadFeatures, ServerFeatures
from palm_mtf.programs.outer import OuterPrograms
from palm_mtf.programs.step_programs import StepPrograms
from palm_mtf.runtime.client.client import Client, at_same_time
from palm_mtf.training.step import TrainStep

# Builds the programs of the settings' pods for features, a batch size of all
# these pods, and devices.
BuildPrograms = Callable[
  [StepConfig, Sequence[str] | ServerFeatures, int, Devices], StepPrograms
]


def build_each_pod(
  config: StepConfig,
  features: Sequence[str] | ServerFeatures,
  batch_size: int,
  devices: Devices,
  build: BuildPrograms,
) -> list[StepPrograms]:
  """Returns the programs of each pod, for its share of `batch_size` rows."""
  num_pods = config.pods.num_pods
  pods = PodsConfig()  # of a cluster, whose devices are known
  if config.pods.pods != "cluster":
    pods = dataclasses.replace(config.pods, num_pods=1)
  found = []
  for pod in range(num_pods):
    own = features
    if isinstance(features, ServerFeatures):
      read = functools.partial(_read_of_pod, features.read, pod, num_pods)
      own = ServerFeatures(features.names, read)
    found.append(
      build(
        dataclasses.replace(config, pods=pods),
        own,
        batch_size // num_pods,
        devices.of_pod(pod),
      )
    )
  return found


def _read_of_pod(
  read: ReadFeatures,
  pod: int,
  num_pods: int,
  cpu: str,
  batches: tf.Tensor,
  step: tf.Tensor,
  part: tf.Tensor,
  num_parts: int,
) -> Sequence[tf.Tensor]:
  # `part` and `num_parts` are of one pod.
  first = pod * num_parts
  return read(cpu, batches, step, first + part, num_pods * num_parts)


def join(pods: Sequence[StepPrograms], devices: Devices) -> StepPrograms:
  """Returns the first pod's programs, with the variables of all pods."""
  return dataclasses.replace(
    pods[0],
    batch_size=sum(x.batch_size for x in pods),
    pod_slices=[y for x in pods for y in x.pod_slices],
    initialize=tf.group([x.initialize for x in pods]),
    devices=devices,
    phases={name: y for x in pods for name, y in x.phases.items()},
  )


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
    sent, merged = (
      self._config.fragment_sent(step),
      self._config.fragment_after(step),
    )
    if sent is not None:
      self._send(sent)
    if merged is not None:
      if not self._pending:  # training began after the step of the send
        self._send(merged)
      self._pending.result()
      self._pending = None
      self._client.call(self._programs.merge[merged])

  def _send(self, fragment: int) -> None:
    self._client.call(self._programs.send[fragment])
    # The exchange needs no turn: it waits for the network, not for devices.
    exchange = self._programs.exchange[fragment]
    self._pending = self._client.run(exchange, has_turn=True)

  def begin(self) -> None:
    """Takes the pods' parameters, which are equal, as outer parameters."""
    self._client.call(self._programs.begin)

  def drop(self) -> None:
    """Drops a sync that a rewind has undone."""
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
    self, steps: Sequence[TrainStep], programs: StepPrograms, syncs: Syncs
  ):
    """Takes a TrainStep per pod, and `join` of their programs."""
    self._steps, self.programs, self._syncs = steps, programs, syncs
    # In one process, pods compile one after another, so that they find each
    # other's code in XLA's cache.
    self._is_first = "/job:" not in programs.devices.client
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
      for x, rows in zip(self._steps, self._cut(batch), strict=True)
    ]
    # A process can do only one full trace at a time.
    in_turn = self._is_first or records is not None
    self._is_first = False
    found = [x() for x in calls] if in_turn else at_same_time(calls)
    self._syncs.run(step + 1)
    return {name: sum(x[name] for x in found) / len(found) for name in found[0]}

  def losses(self, batch: Batch) -> Iterator[Sequence[float]]:
    """Yields what `TrainStep.losses` yields, pod after pod."""
    pairs = zip(self._steps, self._cut(batch), strict=True)
    calls = [functools.partial(lambda x, y: [*x.losses(y)], *z) for z in pairs]
    for of_pod in at_same_time(calls):
      yield from of_pod

  def _cut(self, batch: Batch | str) -> list:
    """Returns each pod's rows of a batch; a text is the same for all pods."""
    if isinstance(batch, str):
      return [batch] * len(self._steps)
    size = self.programs.batch_size // len(self._steps)
    return [
      {name: x[i * size : (i + 1) * size] for name, x in batch.items()}
      for i in range(len(self._steps))
    ]
