# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Validation loss of a run against training time, tokens and FLOPs."""

import dataclasses
import math
from collections.abc import Sequence

from palm_mtf.model_dir.json_lines import read_json_lines
from palm_mtf.model_dir.layout import ModelDir
from palm_mtf.sweep.runs import SweepRun


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
  """The evaluations of a run, each list by evaluation.

  Attributes:
    losses: validation losses, nats a token; NaN for one that is not finite.
    tokens: training tokens before each.
    flops: model FLOPs of these tokens.
    secs: seconds of the steps before each, without evaluations, checkpoints
      and starts.
  """

  losses: Sequence[float]
  tokens: Sequence[int]
  flops: Sequence[float]
  secs: Sequence[float]


def read_curve(run: SweepRun) -> Curve:
  """Reads metrics.jsonl of a run; the curve is empty before its first line."""
  points, secs, last_step = [], 0.0, 0
  lines = read_json_lines(ModelDir(run.model_dir).metrics, number="step")
  for line in lines:
    # The mean of the steps since the line before.
    secs += line.get("step_secs", 0.0) * (line["step"] - last_step)
    last_step = line["step"]
    if "validation_loss" in line:
      loss = line["validation_loss"]  # null where it is not finite
      loss = math.nan if loss is None else loss
      points.append((loss, line["tokens"], secs))
  return Curve(
    losses=[loss for loss, _, _ in points],
    tokens=[tokens for _, tokens, _ in points],
    flops=[tokens * run.flops_per_token for _, tokens, _ in points],
    secs=[secs for _, _, secs in points],
  )
