# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The share of a run's time that remains when chips fail."""

import math


def goodput(
  mtbf_secs: float, segment_secs: float, restart_secs: float
) -> float:
  """Returns useful time / wall-clock time of a run that failures restart.

  A failure undoes the work since the last checkpoint, and the restart takes
  `restart_secs`, in which failures happen too. This is equation 13 of Daly
  (2006), "A higher order estimate of the optimum checkpoint interval", without
  the time that writing a checkpoint takes, because training continues then.

  Args:
    mtbf_secs: mean seconds between failures of the run, infinity for none; the
      times between failures are exponentially distributed.
    segment_secs: seconds of work between two checkpoints, above 0.
    restart_secs: seconds from a failure until the run computes again.
  """
  segment, restart = segment_secs / mtbf_secs, restart_secs / mtbf_secs
  if segment + restart > math.log(1e9):  # a billionth of the time is none
    return 0.0
  if not segment:
    return 1.0
  return segment / (math.exp(restart) * math.expm1(segment))
