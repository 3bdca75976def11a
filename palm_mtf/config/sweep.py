# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which runs a sweep has, and when it stops one."""

import dataclasses
from collections.abc import Mapping, Sequence

from palm_mtf.errors import UserError, are_texts, check_count, check_real


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepConfig:
  """Which runs a sweep has, and when it stops one.

  Attributes:
    sweep_runs: a list of axes, each {name: {macro: value}}; the runs are the
      product of the axes, as in [{"small": {"D_MODEL": 64}, "large": ...},
      {"short": {"TRAIN_STEPS": 100}, "long": ...}]: "small-short" and so on.
    sweep_at_once: runs that train at the same time, each on its share of the
      cores.
    sweep_patience: evaluations without a better validation loss after which a
      run is stopped; None to stop none.
    sweep_min_delta: smallest decrease of the validation loss that counts as
      better, nats a token.
    sweep_held_out: names of an axis whose runs the scaling law is not fitted
      to, but checked on.
    sweep_budget_flops: training FLOPs for which the compute-optimal size is
      printed, or None.
  """

  sweep_runs: Sequence[Mapping[str, Mapping[str, object]]] = ()
  sweep_at_once: int = 1
  sweep_patience: int | None = 5
  sweep_min_delta: float = 0.0
  sweep_held_out: list[str] | tuple[str, ...] = ()
  sweep_budget_flops: float | None = None

  def __post_init__(self):
    check_count("SWEEP_AT_ONCE", self.sweep_at_once)
    if self.sweep_patience is not None:
      check_count("SWEEP_PATIENCE", self.sweep_patience)
    check_real("SWEEP_MIN_DELTA", self.sweep_min_delta, 0.0, 100.0)
    if self.sweep_budget_flops is not None:
      check_real("SWEEP_BUDGET_FLOPS", self.sweep_budget_flops, 1.0, 1e40)
    if not are_texts(self.sweep_held_out):
      raise UserError(
        f"SWEEP_HELD_OUT = {self.sweep_held_out!r}: give a list of names in "
        "SWEEP_RUNS, or [] for none."
      )
