# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Loss spikes, found and dealt with as PaLM 540B did (PaLM 5.1).

The last 5 steps are judged by the 100 before them. For x, the loss or the
logarithm of the norm of the gradients,

  level = median(100)
  noise = 1.4826 median(|x of a step - x of the next| in the 100) / sqrt(2)
  score = (median(last 5) - level) / max(noise, floor)

where 1.4826 makes it the standard deviation if the noise is normal, and floor
is 2 % of the loss's level, 0.02 for the logarithm. Medians leave single bad
batches out of account, so three of five steps have to be high. The level of a
falling loss is too high, in the warm-up more so; after a larger batch the noise
is that of the smaller one: both err towards silence. A spike is

  a loss of score over 6, or over 3 with a norm of the gradients of score over 6

and nothing before the first 105 steps. SPIKE_POLICY = "rewind" then goes back
to a checkpoint at least 100 steps old and trains on without SPIKE_SKIP_STEPS
batches, from 100 steps before the spike on. Where the checkpoint is older, the
steps up to there are the same again. What the detector has seen and what is
left out are in the manifest of every checkpoint, so that a run that was stopped
anywhere, even between a spike and the next checkpoint, goes the same way.
"""

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence

import numpy as np

from palm_mtf.checkpoints.manifest import Checkpoint, find_checkpoints
from palm_mtf.checkpoints.retention import remove_checkpoint
from palm_mtf.config.batch_schedule import BatchSizes
from palm_mtf.config.fault_tolerance import WatchConfig
from palm_mtf.config.skipped_batches import Skips
from palm_mtf.model_dir.json_lines import write_json_lines
from palm_mtf.model_dir.layout import ModelDir

_logger = logging.getLogger(__name__)

REWIND_STEPS = 100
_RECENT, _WINDOW = 5, 100
_FLOOR = 0.02
_SURE, _LIKELY = 6.0, 3.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rewind:
  """One spike and what was done.

  Attributes:
    step: steps done when it was found.
    loss: loss of the last step.
    usual_loss: the median of the 100 steps before the last 5.
    to_step: step of the checkpoint that training went back to.
    skipped: the first and the last batch that are left out from there on.
  """

  step: int
  loss: float
  usual_loss: float
  to_step: int
  skipped: Sequence[int]


class SpikeDetector:
  """Judges each step by the last 105.

  Attributes:
    seen: the last losses and norms of gradients, oldest first.
  """

  def __init__(self, seen: Sequence[Sequence[float]] = ()):
    """Goes on after `seen`, pairs of a loss and a norm."""
    self.seen = [list(pair) for pair in seen]

  def sees_spike(self, loss: float, grad_norm: float) -> bool:
    """Takes in the numbers of one more step; says whether there is a spike."""
    self.seen = [*self.seen, [loss, grad_norm]][-_RECENT - _WINDOW :]
    if len(self.seen) < _RECENT + _WINDOW:
      return False
    losses, norms = np.array(self.seen).T
    # Nothing at all is possible, its logarithm is not.
    norms = np.log(np.maximum(norms, 1e-30))
    loss_score = _score(losses, max(_FLOOR * self.usual_loss, 1e-30))
    norm_score = _score(norms, _FLOOR)
    return loss_score > _SURE or (loss_score > _LIKELY and norm_score > _SURE)

  @property
  def usual_loss(self) -> float:
    """The loss that the last ones are compared with."""
    return float(np.median([loss for loss, _ in self.seen[:_WINDOW]]))


def _score(x: np.ndarray, floor: float) -> float:
  """Returns the score of 105 numbers."""
  before, recent = x[:_WINDOW], x[_WINDOW:]
  noise = 1.4826 * np.median(abs(np.diff(before))) / math.sqrt(2)
  rise = np.median(recent) - np.median(before)
  return float(rise / max(noise, floor))


class SpikePolicy:
  """A run's spikes from one checkpoint on.

  Attributes:
    skips: the batches that are left out.
    rewinds: so far, in order.
  """

  def __init__(
    self,
    config: WatchConfig,
    checkpoint: Checkpoint | None,
    rewinds: Sequence[Rewind] = (),
  ):
    """Goes on from `checkpoint`; `rewinds` may be later than its own."""
    held = checkpoint.manifest.data.get("spikes", {}) if checkpoint else {}
    own = [Rewind(**each) for each in held.get("rewinds", [])]
    self._config = config
    self._detector = SpikeDetector(held.get("seen", []))
    self.rewinds = max(own, list(rewinds), key=len)
    self.skips = config.skips.and_also([x.skipped for x in self.rewinds])
    self._is_on = config.spike_policy == "rewind"

  def sees_spike(self, metrics: Mapping[str, float]) -> bool:
    """Whether training has to go back after a step with these metrics."""
    if not self._is_on:
      return False
    spike = self._detector.sees_spike(metrics["loss"], metrics["grad_norm"])
    if spike and len(self.rewinds) >= self._config.spike_rewinds:
      _logger.warning(
        f"loss spike: {metrics['loss']:.4f}, usual are "
        f"{self._detector.usual_loss:.4f}; training goes on, because there "
        f"were {len(self.rewinds)} rewinds already (SPIKE_REWINDS)"
      )
      self._is_on = False
    return spike and self._is_on

  def manifest_data(self) -> dict[str, object]:
    """What a checkpoint has to hold for a run to go on the same way."""
    data: dict[str, object] = {}
    if self.skips.ranges:
      data["SKIP_STEPS"] = self.skips.ranges
    if self._config.spike_policy == "rewind":
      rewinds = [dataclasses.asdict(each) for each in self.rewinds]
      data["spikes"] = {"rewinds": rewinds, "seen": self._detector.seen}
    return data

  def rewind(
    self, model_dir: str, step: int, loss: float, sizes: BatchSizes
  ) -> tuple[Checkpoint | None, list[Rewind]]:
    """Removes the checkpoints since the one to go back to, and says so.

    Args:
      model_dir: MODEL_DIR.
      step: steps done.
      loss: loss of the last step.
      sizes: the batch size of every step.

    Returns:
      The checkpoint to go on from, None for the first weights, and all rewinds.
    """
    found = find_checkpoints(model_dir)
    target = max(0, step - REWIND_STEPS)
    old_enough = [x for x in found if x.manifest.step <= target]
    back = old_enough[-1] if old_enough else found[0] if found else None
    to_step = back.manifest.step if back else 0
    first = self.skips.batch_read(max(target, to_step), sizes)
    new = Rewind(
      step=step,
      loss=loss,
      usual_loss=self._detector.usual_loss,
      to_step=to_step,
      skipped=[first, first + self._config.spike_skip_steps - 1],
    )
    rewinds = [*self.rewinds, new]
    _logger.warning(_message(new, back, self.skips.and_also([new.skipped])))
    path = ModelDir(model_dir).rewinds
    write_json_lines(path, map(dataclasses.asdict, rewinds))
    # The newest first: whenever this is cut short, a run goes on from the
    # newest that is left, finds the same spike and comes here again.
    for late in reversed(found):
      if late.manifest.step > to_step:
        remove_checkpoint(late.path)
    return back, rewinds


def _message(new: Rewind, back: Checkpoint | None, skips: Skips) -> str:
  where = back.path if back else "the first weights"
  age = new.step - new.to_step
  kept = "" if age >= REWIND_STEPS else ", the oldest there is"
  return (
    f"loss spike at step {new.step}: {new.loss:.4f}, usual are "
    f"{new.usual_loss:.4f}; back by {age} steps to {where}{kept}, and on "
    f"without the batches {new.skipped[0]} to {new.skipped[1]} (as with "
    f"SKIP_STEPS = {skips.ranges})"
  )
