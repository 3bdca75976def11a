# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Early stopping: a run whose validation loss gets no better is stopped.

The rule is that of Prechelt (1998, "Early stopping - but when?") with patience,
as deep learning libraries have it.
"""

import math
from collections.abc import Iterable

from palm_mtf.config import SweepConfig


def should_stop(losses: Iterable[float], sweep: SweepConfig) -> bool:
  """Returns whether a run has had its last improvement SWEEP_PATIENCE ago.

  Args:
    losses: validation losses of the run by step, nats a token.
    sweep: SWEEP_PATIENCE, in evaluations, and SWEEP_MIN_DELTA.
  """
  best, num_worse = math.inf, 0
  for loss in losses:
    if loss < best - sweep.sweep_min_delta:
      best, num_worse = loss, 0
    else:
      num_worse += 1
  return sweep.sweep_patience is not None and num_worse >= sweep.sweep_patience
