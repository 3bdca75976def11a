# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What ON_POD_FAILURE makes of a lost pod: the pods that the run goes on with.

  stop     none: the same command goes on later
  wait     the same, once the lost one answers; one on this machine is started
           anew
  shrink   the others, which share the same batches

Training goes on from the last checkpoint, and is from there what a run with
these pods is. A pod that is missing when a run starts is waited for under
"wait", and ends it otherwise: shrinking is for a pod that the run has had. A
server that cannot do its part ends a run whatever the policy.
"""

import logging
import time
from collections.abc import Sequence

from palm_mtf.cluster.heartbeat import Heartbeat, PodLostError
from palm_mtf.cluster.local_servers import PodServers
from palm_mtf.config import mesh_layout
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import PalmConfig
from palm_mtf.config.pods import PodsConfig
from palm_mtf.errors import UserError

_logger = logging.getLogger(__name__)

_PAUSE_SECS = 1.0
# That a run waits for without a new checkpoint between them.
_MAX_LOSSES = 3


class PodRecovery:
  """Decides, after each loss of a run, what comes next."""

  def __init__(
    self, servers: PodServers, model: PalmConfig, batch_sizes: Sequence[int]
  ):
    """Knows what the run trains.

    Args:
      servers: servers of its pods.
      model: the architecture.
      batch_sizes: batch sizes of all its steps.
    """
    self._servers, self._model = servers, model
    self._batch_sizes = batch_sizes
    self._step, self._num_losses = -1, 0
    self._had_all_pods = False

  def pods_after(
    self, lost: PodLostError, pods: PodsConfig, mesh: MeshLayout, step: int
  ) -> PodsConfig:
    """Returns the pods to go on with; waits until they answer.

    Args:
      lost: what happened.
      pods: those until then.
      mesh: devices and layout rules of each pod.
      step: step of the newest checkpoint, 0 where there is none.

    Raises:
      UserError: the run ends.
    """
    self._had_all_pods = self._had_all_pods or not lost.is_missing
    policy = pods.on_pod_failure
    if not self._had_all_pods and policy != "wait":
      raise UserError(f"{lost}; {_start_it(pods)}.") from None
    if policy == "stop":
      raise UserError(f"{lost}; run the same command to go on.") from None
    _logger.warning(f"{lost}; ON_POD_FAILURE = {policy!r}")
    if policy == "shrink":
      pods = self._without(lost, pods, mesh)
    else:
      self._count(lost, step)
      self._wait(lost, pods)
    _logger.info(f"going on from step {step} on {pods.num_pods} pods")
    return pods

  def _without(
    self, lost: PodLostError, pods: PodsConfig, mesh: MeshLayout
  ) -> PodsConfig:
    num_pods = pods.num_pods - 1
    if not num_pods:
      raise UserError(f"{lost}; no pod is left to shrink to.") from None
    try:
      mesh_layout.check(
        mesh, self._model, *self._batch_sizes, num_pods=num_pods
      )
    except UserError as error:
      raise UserError(
        f"{lost}; the run cannot shrink to {num_pods} pods: {error}"
      ) from None
    return self._servers.remove(lost.pod)

  def _count(self, lost: PodLostError, step: int) -> None:
    """Raises UserError where a run only loses pods and saves no step."""
    if step != self._step:
      self._step, self._num_losses = step, 0
    self._num_losses += 1
    if self._num_losses > _MAX_LOSSES:
      raise UserError(
        f"{lost}; {self._num_losses} times a pod was lost since step {step} "
        "was saved; save more often (CHECKPOINT_STEPS), or see to that pod, "
        "and run the same command to go on."
      ) from None

  def _wait(self, lost: PodLostError, pods: PodsConfig) -> None:
    end = time.monotonic() + pods.pod_wait_secs
    while True:
      self._servers.start_anew(lost.pod)
      try:
        Heartbeat(self._servers, self._servers.places(), pods.pod_timeout_secs)
        return
      except PodLostError as error:
        lost = error  # perhaps another one
      if time.monotonic() > end:
        raise UserError(
          f"{lost}; it was waited for, {pods.pod_wait_secs:g} seconds "
          "(POD_WAIT_SECS); run the same command to go on."
        ) from None
      time.sleep(_PAUSE_SECS)


def _start_it(pods: PodsConfig) -> str:
  if pods.pods == "cluster":
    return (
      "start it with `palm_mtf pods serve`, or correct ISLANDS; "
      'ON_POD_FAILURE = "wait" would wait for it'
    )
  return "run the same command to start it anew"
