# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Detects loss spikes, and skips their batches after a rewind (PaLM 5.1).

SPIKE_POLICY = "rewind" returns to a checkpoint at least 100 steps before the
spike, and skips SPIKE_SKIP_STEPS batches, from 100 steps before the spike on.
"""

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence

import numpy as np

from palm_mtf.checkpoints.manifest import (
  Checkpoint,
  ReadCheckpoint,
  checkpoint_folders,
  first_whole,
  read_whole,
)
from palm_mtf.config import WatchConfig
from palm_mtf.config.run import BatchSizes
from palm_mtf.model_dir.json_lines import write_json_lines
from palm_mtf.model_dir.paths import ModelDir, step_of

_logger = logging.getLogger(__name__)

REWIND_STEPS = 100
# The last 5 steps are compared with the 100 steps before them.
_RECENT, _WINDOW = 5, 100
# Lower bound of the noise, so that a tiny rise of a smooth loss is no spike: 2%
# of the usual loss, and 0.02 in the logarithm of the gradient norm.
_FLOOR = 0.02
# A score is a rise in units of noise. The loss has spiked if its score is above
# 6, or above 3 while the score of the gradient norm is above 6.
_SURE, _LIKELY = 6.0, 3.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rewind:
  """A loss spike, and the batches that training skips because of the spike."""

  step: int  # steps done when the spike was detected
  loss: float  # loss of the last step
  usual_loss: float  # median loss of the 100 steps before the last 5
  to_step: int  # step of the checkpoint that training went back to
  skipped: Sequence[int]  # numbers of the first and the last skipped batch


class SpikeDetector:
  """Detects a spike in the losses and gradient norms of the last 105 steps."""

  def __init__(self, seen: Sequence[Sequence[float]] = ()):
    # (loss, gradient norm) of at most the last 105 steps, oldest first.
    # Checkpoints hold this list, so that a resumed run sees the same spikes.
    self.seen = [list(pair) for pair in seen]

  def sees_spike(self, loss: float, grad_norm: float) -> bool:
    """Records a step's loss and gradient norm; returns whether loss spikes."""
    self.seen = [*self.seen, [loss, grad_norm]][-_RECENT - _WINDOW :]
    if len(self.seen) < _RECENT + _WINDOW:
      return False
    losses, norms = np.array(self.seen).T
    loss_score = _score_rise(losses, max(_FLOOR * self.usual_loss, 1e-30))
    if not _LIKELY < loss_score <= _SURE:
      return loss_score > _SURE
    # A norm may be 0, which has no logarithm.
    norms = np.log(np.maximum(norms, 1e-30))
    return _score_rise(norms, _FLOOR) > _SURE

  @property
  def usual_loss(self) -> float:
    """Median loss of the 100 steps before the last 5."""
    return float(np.median([loss for loss, _ in self.seen[:_WINDOW]]))


def _score_rise(x: np.ndarray, floor: float) -> float:
  """Returns the rise of the last 5 of 105 values, in units of the noise.

  The rise is the difference of the medians of the last 5 and the first 100.
  `floor` is a lower bound of the noise.
  """
  before, recent = x[:_WINDOW], x[_WINDOW:]
  # The noise is the standard deviation of one value, estimated from differences
  # of neighbours: for a normal distribution, it is 1.4826 times the median
  # absolute value, and a difference has sqrt(2) times the noise of one value.
  # The median of the last 5 ignores up to two bad batches. The estimates may
  # hide a spike, but never make noise look like one: while the loss falls, the
  # median of the first 100 is too high; after a change to larger batches, the
  # noise is too large.
  noise = 1.4826 * np.median(abs(np.diff(before))) / math.sqrt(2)
  rise = np.median(recent) - np.median(before)
  return float(rise / max(noise, floor))


class SpikePolicy:
  """Detects spikes, and decides when to rewind and which batches to skip."""

  def __init__(
    self,
    config: WatchConfig,
    checkpoint: Checkpoint | None,
    rewinds: Sequence[Rewind] = (),
  ):
    """Continues from the state in `checkpoint`; if it is None, begins a run.

    `rewinds`: all rewinds of the run, if `checkpoint` does not record them all.
    """
    held = checkpoint.manifest.data.get("spikes", {}) if checkpoint else {}
    own = [Rewind(**each) for each in held.get("rewinds", [])]
    self._config = config
    self._detector = SpikeDetector(held.get("seen", []))
    self.rewinds = max(own, list(rewinds), key=len)
    self.skips = config.skips.and_also([x.skipped for x in self.rewinds])
    self._is_on = config.spike_policy == "rewind"

  def sees_spike(self, metrics: Mapping[str, float]) -> bool:
    """Returns whether to rewind now, after a step with these metrics."""
    if not self._is_on:
      return False
    spike = self._detector.sees_spike(metrics["loss"], metrics["grad_norm"])
    if spike and len(self.rewinds) >= self._config.spike_rewinds:
      _logger.warning(
        f"loss spike: {metrics['loss']:.4f}, usually "
        f"{self._detector.usual_loss:.4f}; training continues, because there "
        f"were {len(self.rewinds)} rewinds already (SPIKE_REWINDS)"
      )
      self._is_on = False
    return spike and self._is_on

  def make_manifest_data(self) -> dict[str, object]:
    """Returns the policy's state, to be saved in a checkpoint's manifest."""
    data: dict[str, object] = {}
    if self.skips.ranges:
      data["SKIP_STEPS"] = self.skips.ranges
    if self._config.spike_policy == "rewind":
      rewinds = [dataclasses.asdict(each) for each in self.rewinds]
      data["spikes"] = {"rewinds": rewinds, "seen": self._detector.seen}
    return data

  def rewind(
    self,
    model_dir: str,
    step: int,
    loss: float,
    sizes: BatchSizes,
    read: ReadCheckpoint = read_whole,
  ) -> tuple[Checkpoint | None, list[Rewind]]:
    """Finds a complete checkpoint to rewind to; removes no checkpoint.

    `step` is the number of steps done; `loss` is the loss of the last step.
    `read` raises an error if a checkpoint is incomplete.

    Returns:
      The checkpoint to rewind to (None for the initial weights), and all
      rewinds, including the new one.

    Raises:
      UserError: there are checkpoints, but none is complete.
    """
    target = max(0, step - REWIND_STEPS)
    folders = checkpoint_folders(model_dir)
    old_enough = [x for x in folders if step_of(x) <= target]
    # Try checkpoints at or before `target` first, newest first; then later
    # ones, the nearest to `target` first.
    in_order = old_enough[::-1] + folders[len(old_enough) :]
    back = first_whole(in_order, f"MODEL_DIR = {model_dir!r}", read)
    to_step = back.manifest.step if back else 0
    # If the checkpoint is older than `target`, the steps up to `target` read
    # the same batches as before, so skip only later batches.
    first = self.skips.batch_read(max(target, to_step), sizes)
    new = Rewind(
      step=step,
      loss=loss,
      usual_loss=self._detector.usual_loss,
      to_step=to_step,
      skipped=[first, first + self._config.spike_skip_steps - 1],
    )
    rewinds = [*self.rewinds, new]
    where = back.path if back else "the first weights"
    age = step - to_step
    kept = "" if age >= REWIND_STEPS else ", the oldest there is"
    skips = self.skips.and_also([new.skipped])
    _logger.warning(
      f"loss spike at step {step}: {loss:.4f}, usually {new.usual_loss:.4f}; "
      f"back by {age} steps to {where}{kept}; resuming without the "
      f"batches {new.skipped[0]} to {new.skipped[1]} (as with SKIP_STEPS = "
      f"{skips.ranges})"
    )
    path = ModelDir(model_dir).rewinds
    write_json_lines(path, map(dataclasses.asdict, rewinds))
    return back, rewinds
