# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What ON_POD_FAILURE makes of a lost pod: the pods that the run goes on with.

  stop     none: the same command goes on later
  wait     the same, once the lost one answers; one on this machine is started
           anew
  shrink   the others, which share the same batches

Training goes on from the last checkpoint, and is from there what a run with
these pods is.
"""

import time
from collections.abc import Sequence

from palm_mtf import layout
from palm_mtf.config import PalmConfig
from palm_mtf.console import say
from palm_mtf.errors import UserError
from palm_mtf.layout import MeshLayout
from palm_mtf.pod_servers import PodServers
from palm_mtf.pod_watch import PodLostError, PodWatch
from palm_mtf.pods_config import PodsConfig

_PAUSE_SECS = 1.0
# Losses without a new checkpoint between them, after which none will come.
_MAX_LOSSES = 3


class PodRecovery:
  """Decides, after each loss of a run, what comes next."""

  def __init__(
    self, servers: PodServers, model: PalmConfig, batch_sizes: Sequence[int]
  ):
    """Knows what the run trains.

    Args:
      servers: of its pods.
      model: the architecture.
      batch_sizes: of all its steps.
    """
    self._servers, self._model = servers, model
    self._batch_sizes = batch_sizes
    self._step, self._num_losses = -1, 0

  def pods_after(
    self, lost: PodLostError, pods: PodsConfig, mesh: MeshLayout, step: int
  ) -> PodsConfig:
    """Returns the pods to go on with; waits until they answer.

    Args:
      lost: what happened.
      pods: those until then.
      mesh: of each.
      step: of the newest checkpoint, 0 where there is none.

    Raises:
      UserError: the run ends.
    """
    if step != self._step:
      self._step, self._num_losses = step, 0
    self._num_losses += 1
    if pods.on_pod_failure == "stop" or self._num_losses > _MAX_LOSSES:
      raise UserError(f"{lost}; run the same command to go on.") from None
    say(f"{lost}; ON_POD_FAILURE = {pods.on_pod_failure!r}")
    if pods.on_pod_failure == "shrink":
      pods = self._without(lost, pods, mesh)
    else:
      self._wait(lost, pods)
    say(f"going on from step {step} on {pods.num_pods} pods")
    return pods

  def _without(
    self, lost: PodLostError, pods: PodsConfig, mesh: MeshLayout
  ) -> PodsConfig:
    num_pods = pods.num_pods - 1
    if not num_pods:
      raise UserError(f"{lost}; no pod is left to shrink to.") from None
    try:
      layout.check(mesh, self._model, *self._batch_sizes, num_pods=num_pods)
    except UserError as error:
      raise UserError(
        f"{lost}; the run cannot shrink to {num_pods} pods: {error}"
      ) from None
    return self._servers.remove(lost.pod)

  def _wait(self, lost: PodLostError, pods: PodsConfig) -> None:
    self._servers.start_anew(lost.pod)
    end = time.monotonic() + pods.pod_wait_secs
    while True:
      try:
        PodWatch(self._servers, self._servers.places(), pods.pod_timeout_secs)
        return
      except PodLostError as error:
        if time.monotonic() > end:
          raise UserError(
            f"{error}; it was waited for, {pods.pod_wait_secs:g} seconds "
            "(POD_WAIT_SECS); run the same command to go on."
          ) from None
      time.sleep(_PAUSE_SECS)
