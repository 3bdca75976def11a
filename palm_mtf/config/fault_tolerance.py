# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a training run does when something goes wrong."""

import dataclasses

from palm_mtf.config.skipped_batches import Skips
from palm_mtf.errors import check_choice, check_count, check_real


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchConfig:
  """What a training run does when something goes wrong.

  Attributes:
    skip_steps: batches to leave out, pairs of first and last
    (skipped_batches.py).
    spike_policy: "off", or "rewind": at a loss spike, back to a checkpoint and
      on without the batches around it (training/loss_spikes.py).
    spike_skip_steps: how many batches that is, 200 to 500 in PaLM.
    spike_rewinds: how often at most; PaLM 540B had about 20 spikes.
    watchdog_secs: ends the run, with stacks, when no step is done for so long;
      a first step and a checkpoint may take ten times as long. None: never.
  """

  skip_steps: list[list[int]] | tuple[tuple[int, int], ...] = ()
  spike_policy: str = "off"
  spike_skip_steps: int = 300
  spike_rewinds: int = 20
  watchdog_secs: float | None = 1800.0

  def __post_init__(self):
    Skips(self.skip_steps)  # is checked when it is made
    check_choice("SPIKE_POLICY", self.spike_policy, ["off", "rewind"])
    check_count("SPIKE_SKIP_STEPS", self.spike_skip_steps)
    check_count("SPIKE_REWINDS", self.spike_rewinds)
    if self.watchdog_secs is not None:
      check_real("WATCHDOG_SECS", self.watchdog_secs, 1.0, 1e9)

  @property
  def skips(self) -> Skips:
    """The batches of skip_steps."""
    return Skips(self.skip_steps)
