# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""ON_POD_FAILURE: the pods with which a run continues after it lost a pod.

  stop     none: the same command resumes the run later
  wait     the same pods, after the lost pod answers
  shrink   the other pods, which then share each batch

Training resumes from the newest checkpoint.
"""

import logging
import time
from collections.abc import Sequence

from palm_mtf.config import MeshLayout, PalmConfig, PodsConfig, mesh_layout
from palm_mtf.errors import UserError
from palm_mtf.runtime.client.heartbeat import Heartbeat, PodLostError
from palm_mtf.runtime.client.local_servers import PodServers

_logger = logging.getLogger(__name__)

_PAUSE_SECS = 1.0
# With ON_POD_FAILURE = "wait", a run ends if it loses pods more often than this
# between two checkpoints.
_MAX_LOSSES = 3


class PodRecovery:
  """Lets a run continue after the loss of a pod, as ON_POD_FAILURE says."""

  def __init__(
    self, servers: PodServers, model: PalmConfig, batch_sizes: Sequence[int]
  ):
    # Kept to check that model and batch sizes work with fewer pods.
    self._servers, self._model, self._batch_sizes = servers, model, batch_sizes
    self._step, self._num_losses = -1, 0
    self._had_all_pods = False

  def pods_after(
    self, lost: PodLostError, pods: PodsConfig, mesh: MeshLayout, step: int
  ) -> PodsConfig:
    """Returns the settings of the pods to continue with.

    If ON_POD_FAILURE is "wait", waits until all servers answer. `step` is the
    step of the newest checkpoint, 0 if there is none.

    Raises:
      UserError: the run cannot continue.
    """
    # Drop no pod until all pods have answered once: a pod that is missing at
    # the start is a mistake in the settings, or is not started yet.
    self._had_all_pods = self._had_all_pods or not lost.is_missing
    policy = pods.on_pod_failure
    if not self._had_all_pods and policy != "wait":
      advice = "run the same command to start it again"
      if pods.pods == "cluster":
        advice = (
          "start it with `palm_mtf pods serve`, or correct ISLANDS; "
          'ON_POD_FAILURE = "wait" would wait for it'
        )
      raise UserError(f"{lost}; {advice}.") from None
    if policy == "stop":
      raise UserError(f"{lost}; run the same command to resume.") from None
    _logger.warning(f"{lost}; ON_POD_FAILURE = {policy!r}")
    if policy == "shrink":
      pods = self._shrink(lost, pods, mesh)
    else:
      self._count_loss(lost, step)
      self._wait(lost, pods)
    _logger.info(f"continuing from step {step} on {pods.num_pods} pods")
    return pods

  def _shrink(
    self, lost: PodLostError, pods: PodsConfig, mesh: MeshLayout
  ) -> PodsConfig:
    num_pods = pods.num_pods - 1
    if not num_pods:
      raise UserError(f"{lost}; no pod is left to shrink to.") from None
    try:
      mesh_layout.check_layout(
        mesh, self._model, *self._batch_sizes, num_pods=num_pods
      )
    except UserError as error:
      raise UserError(
        f"{lost}; the run cannot shrink to {num_pods} pods: {error}"
      ) from None
    return self._servers.remove(lost.pod)

  def _count_loss(self, lost: PodLostError, step: int) -> None:
    """Raises UserError after too many losses without a new checkpoint."""
    if step != self._step:
      self._step, self._num_losses = step, 0
    self._num_losses += 1
    if self._num_losses > _MAX_LOSSES:
      raise UserError(
        f"{lost}; a pod was lost {self._num_losses} times since step {step} "
        "was saved; save more often (CHECKPOINT_STEPS), or repair that pod, "
        "and run the same command to resume."
      ) from None

  def _wait(self, lost: PodLostError, pods: PodsConfig) -> None:
    end = time.monotonic() + pods.pod_wait_secs
    while True:
      self._servers.restart(lost.pod)
      try:
        # Ask every server once. A UserError that is no PodLostError says that a
        # server cannot be used, and ends the run.
        places, secs = self._servers.places(), pods.pod_timeout_secs
        Heartbeat(self._servers, places, secs).check_links()
        return
      except PodLostError as error:
        lost = error  # may name another pod
      if time.monotonic() > end:
        raise UserError(
          f"{lost}; the run waited for {pods.pod_wait_secs:g} seconds "
          "(POD_WAIT_SECS); run the same command to resume."
        ) from None
      time.sleep(_PAUSE_SECS)
