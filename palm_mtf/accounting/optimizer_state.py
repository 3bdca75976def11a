# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Optimizer slots, the optimizer's variables per parameter: dims and bytes.

slot                              dimensions  exists
<parameter>/second_moment         all         SECOND_MOMENT "full"; for vectors
<parameter>/second_moment_row     rows        SECOND_MOMENT "factored"; matrices
<parameter>/second_moment_column  columns     SECOND_MOMENT "factored"; matrices
<parameter>/momentum              all         BETA1 > 0
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from palm_mtf.architecture.parameters import frozen_names, parse_name
from palm_mtf.config import AdafactorConfig
from palm_mtf.errors import UserError

# SECOND_MOMENT of a checkpoint without slots, such as imported weights.
NO_MOMENTS = "none"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerState:
  """The settings that decide which optimizer slots parameters have."""

  second_moment: str  # "full" or "factored"
  momentum: str  # dtype of the momentum; "none" without momentum


@dataclasses.dataclass(frozen=True)
class Slot:
  """One optimizer slot of a parameter."""

  name: str  # such as "momentum"; variables are named <parameter>/<name>
  dims: slice  # the dimensions of the parameter that the slot has
  dtype: str  # "float32" or "bfloat16"


# The settings with which optimizer slots take the most bytes, for callers of
# `checkpoint_bytes` that do not know the run's optimizer.
LARGEST_STATE = OptimizerState(second_moment="full", momentum="float32")


def optimizer_state(optimizer: AdafactorConfig) -> OptimizerState:
  """Returns the settings that decide which slots parameters have."""
  return OptimizerState(
    second_moment=optimizer.second_moment,
    momentum=optimizer.momentum_dtype if optimizer.beta1 else "none",
  )


def row_rank(parameter: str) -> int:
  """Returns how many leading dimensions are the rows of factored moments."""
  # A product x w sums over the rows of w: q [d_model, heads, d_kv] has d_model
  # rows, and o [heads, d_kv, d_model] has heads * d_kv rows.
  return 2 if parse_name(parameter).part == "attention/o" else 1


def parameter_slots(
  parameter: str, rank: int, state: OptimizerState
) -> list[Slot]:
  """Returns the slots of a parameter with `rank` dimensions, momentum last."""
  whole = slice(0, rank)
  slots = [Slot("second_moment", whole, "float32")]
  if state.second_moment == "factored" and rank > 1:
    rows = row_rank(parameter)
    slots = [
      Slot("second_moment_row", slice(0, rows), "float32"),
      Slot("second_moment_column", slice(rows, rank), "float32"),
    ]
  if state.momentum != "none":
    slots.append(Slot("momentum", whole, state.momentum))
  return slots


def checkpoint_bytes(
  shapes: Mapping[str, tuple[int, ...]],
  state: OptimizerState = LARGEST_STATE,
  frozen: Sequence[str] = (),
) -> int:
  """Returns the bytes of float32 parameters and their optimizer slots.

  Parameters that `frozen`, the patterns of FROZEN, matches have no slots.
  """
  parameters = sum(4 * math.prod(shape) for shape in shapes.values())
  without = frozen_names(shapes, frozen)
  trained = {x: shape for x, shape in shapes.items() if x not in without}
  return parameters + slot_bytes(trained, state)


def slot_bytes(
  shapes: Mapping[str, tuple[int, ...]], state: OptimizerState
) -> int:
  """Returns the bytes of slots for parameters, or for slices of parameters."""
  return sum(
    DTYPE_BYTES[slot.dtype] * math.prod(shape[slot.dims])
    for name, shape in shapes.items()
    for slot in parameter_slots(name, len(shape), state)
  )


def check_same_slots(
  place: str, settings: Mapping[str, object], optimizer: AdafactorConfig
) -> None:
  """Raises UserError unless a checkpoint has the slots that a run needs.

  A run with `settings` ({macro: value}) wrote the checkpoint, which is at
  `place`. The run that resumes from it has the settings `optimizer`.
  """
  if settings.get("SECOND_MOMENT") == NO_MOMENTS:
    raise UserError(
      f"{place}: has only weights, without the moments of an optimizer; start "
      "from it in another MODEL_DIR, as its INIT_CHECKPOINT with INIT_STATE = "
      '"weights".'
    )
  # A checkpoint of an earlier version may lack a setting. Assume the run's
  # value, so that the run can resume.
  held = {
    field.name: settings.get(field.name.upper(), getattr(optimizer, field.name))
    for field in dataclasses.fields(optimizer)
  }
  # Settings are compared one by one, so that the message names the setting that
  # differs. BETA1 may change, but not to or from 0, which has no momentum.
  for name in ("second_moment", "beta1", "momentum_dtype"):
    changed = dataclasses.replace(optimizer, **{name: held[name]})
    if optimizer_state(changed) != optimizer_state(optimizer):
      raise UserError(
        f"{name.upper()} = {getattr(optimizer, name)!r}: {place} was written "
        f"with {held[name]!r}, so its moments do not fit; keep that value, or "
        "start from scratch in another MODEL_DIR."
      )
