# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""How pods keep their parameters together: by gradients, or seldom (DiLoCo).

With EXCHANGE = "diloco", each pod updates its own parameters by its own rows.
Pods exchange parameters only at *syncs*, one fragment of the model at a time:

  OUTER_STEPS = 4, FRAGMENTS = 2, OVERLAP_STEPS = 1

  after step                    1     2     3     4     5     6
  fragment 0                  send  merge             send  merge
  fragment 1                              send  merge
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal

from palm_mtf.config.checked import Checked, Count, real, refuse_unused, whole
from palm_mtf.config.run import RunConfig
from palm_mtf.errors import UserError

# Numbers of steps after which the outer parameters are needed (saved, validated
# and so on), so these steps have to be syncs.
_AT_SYNCS = [
  f"{x}_STEPS" for x in ("TRAIN", "CHECKPOINT", "EVAL", "SAMPLE", "TASK_EVAL")
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeConfig(Checked):
  """What pods exchange, and when.

  Attributes:
    exchange: "gradients", the sum of all pods' gradients in every step; or
      "diloco", the mean of all pods' parameters, seldom (Douillard et al. 2023,
      arXiv:2311.08105). The settings below are for "diloco".
    outer_steps: steps from one sync of a fragment to its next (H).
    outer_lr: learning rate of the outer update.
    outer_momentum: Nesterov momentum of the outer update.
    fragments: number of fragments of the model, which are synced in turn
      (Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512). Fragment p
      has the layers p, p + FRAGMENTS, ...; the first also has the embeddings,
      and the last all else.
    overlap_steps: a pod sends its parameters this many steps before they are
      merged, and trains meanwhile (tau).
    merge_alpha: at a sync, a pod continues with merge_alpha times its own
      parameters plus (1 - merge_alpha) times the outer parameters (alpha in
      arXiv:2501.18512).
    outer_dtype: format in which pods send a fragment. "float32": parameters.
      Otherwise their changes since the last sync: "bfloat16", "int8", or
      "e3m0", 4 bits with a sign and 3 bits of exponent. Sums are float32.
  """

  exchange: Literal["gradients", "diloco"] = "gradients"
  outer_steps: Count = 100
  outer_lr: Annotated[float, real(0.0, 10.0)] = 0.7
  outer_momentum: Annotated[float, real(0.0, 0.9999)] = 0.9
  fragments: Count = 1
  overlap_steps: Annotated[int, whole(0)] = 0
  merge_alpha: Annotated[float, real(0.0, 1.0)] = 0.0
  outer_dtype: Literal["float32", "bfloat16", "int8", "e3m0"] = "float32"

  def __post_init__(self) -> None:
    super().__post_init__()
    steps, count = self.outer_steps, self.fragments
    if steps % count:
      raise UserError(
        f"OUTER_STEPS = {steps} and FRAGMENTS = {count}: fragments take turns "
        "of equal length; give a multiple of FRAGMENTS, such as "
        f"OUTER_STEPS = {-(-steps // count) * count}."
      )
    if self.overlap_steps >= self.period:
      raise UserError(
        f"OVERLAP_STEPS = {self.overlap_steps}: the next fragment is sent "
        f"after {self.period} steps (OUTER_STEPS / FRAGMENTS); give at most "
        f"{self.period - 1}."
      )

  @property
  def is_diloco(self) -> bool:
    """Whether pods exchange parameters seldom."""
    return self.exchange == "diloco"

  @property
  def period(self) -> int:
    """Number of steps from the sync of a fragment to that of the next one."""
    return self.outer_steps // self.fragments

  def fragment_after(self, step: int) -> int | None:
    """Returns the fragment that is merged after `step` steps, or None."""
    number, rest = divmod(step, self.period)
    return None if rest or not step else (number - 1) % self.fragments

  def can_save(self, step: int) -> bool:
    """Returns whether no fragment is being sent after `step` steps."""
    left = -step % self.period
    return not self.is_diloco or not 0 < left <= self.overlap_steps

  def fragment_sent(self, step: int) -> int | None:
    """Returns the fragment that pods send after `step` steps, or None."""
    return self.fragment_after(step + self.overlap_steps)


def check_exchange(
  exchange: ExchangeConfig, run: RunConfig, values: Mapping[str, object]
) -> None:
  """Raises UserError unless the other settings of a run fit EXCHANGE.

  `values` is {macro: value} of all settings of the run.
  """
  given, count = 'EXCHANGE = "diloco"', exchange.fragments
  if not exchange.is_diloco:
    names = [x.name for x in dataclasses.fields(exchange)]
    refuse_unused(exchange, names, 'EXCHANGE = "gradients"', given)
    return
  if values["STEPS_PER_LOOP"] != 1:
    raise UserError(
      f"{given} and STEPS_PER_LOOP = {values['STEPS_PER_LOOP']!r}: a call of "
      "several steps could run beyond a sync; set STEPS_PER_LOOP = 1."
    )
  function = values.get("MODEL_FUNCTION")
  if function and count > 1:
    raise UserError(
      f"FRAGMENTS = {count} and MODEL_FUNCTION = {function!r}: which layer has "
      "a parameter is known only for PaLM's blocks; set FRAGMENTS = 1."
    )
  layers = values["NUM_LAYERS"]
  if isinstance(layers, int) and layers % count:
    fit = max(x for x in range(1, count) if layers % x == 0)
    raise UserError(
      f"NUM_LAYERS = {layers} and FRAGMENTS = {count}: all fragments have "
      f"equally many layers; give a divisor of NUM_LAYERS, such as {fit}."
    )
  turns = [(f"{x} =", values.get(x), exchange.period) for x in _AT_SYNCS]
  for step, _ in run.batch_sizes.pairs:
    turns.append(("GLOBAL_BATCH_SIZE from step", step, exchange.outer_steps))
  for what, steps, every in turns:
    if isinstance(steps, int) and steps % every:
      raise UserError(
        f"{what} {steps} and {given}: pods differ inside a round of syncs; "
        f"give a multiple of {every}, such as {-(-steps // every) * every}."
      )
