# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What the optimizer keeps beside each parameter: its slots, and their bytes.

  P/second_moment          the shape of P   SECOND_MOMENT = "full", and vectors
  P/second_moment_row      the rows of P    SECOND_MOMENT = "factored"
  P/second_moment_column   its columns      the same
  P/momentum               the shape of P   BETA1 > 0

P is the parameter's name. Where it has two dimensions or more it is a matrix
from what it multiplies, its rows, to what comes out, its columns: q [d_model,
heads, d_kv] has d_model rows and heads * d_kv columns, o [heads, d_kv, d_model]
has heads * d_kv rows; each row of the embedding is a token. The slots are
float32, but momentum is of MOMENTUM_DTYPE.
"""

import dataclasses
import math
from collections.abc import Mapping

from palm_mtf.config.optimizer import AdafactorConfig
from palm_mtf.config.parameter_names import parsed
from palm_mtf.errors import UserError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerState:
  """Which slots every parameter has.

  Attributes:
    second_moment: SECOND_MOMENT.
    momentum: its dtype, or "none".
  """

  second_moment: str
  momentum: str


@dataclasses.dataclass(frozen=True)
class Slot:
  """One slot of a parameter.

  Attributes:
    name: what follows the parameter's name and a slash.
    dims: the dimensions of the parameter that it has.
    dtype: "float32" or "bfloat16".
  """

  name: str
  dims: slice
  dtype: str


LARGEST_STATE = OptimizerState(second_moment="full", momentum="float32")


def optimizer_state(optimizer: AdafactorConfig) -> OptimizerState:
  """Returns which slots `optimizer` keeps."""
  return OptimizerState(
    second_moment=optimizer.second_moment,
    momentum=optimizer.momentum_dtype if optimizer.beta1 else "none",
  )


def row_rank(parameter: str) -> int:
  """Returns how many of the first dimensions are the rows of a matrix."""
  return 2 if parsed(parameter).part == "attention/o" else 1


def parameter_slots(
  parameter: str, rank: int, state: OptimizerState
) -> list[Slot]:
  """Returns the slots of a parameter, those of the second moment first.

  Args:
    parameter: its name, which says how it is a matrix.
    rank: how many dimensions it has.
    state: which slots there are.
  """
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
  shapes: Mapping[str, tuple[int, ...]], state: OptimizerState = LARGEST_STATE
) -> int:
  """Returns the size of all parameters, float32 each, and of their slots.

  Args:
    shapes: the parameters' shapes, by name.
    state: which slots there are; by default as many as there may be.
  """
  parameters = sum(4 * math.prod(shape) for shape in shapes.values())
  return parameters + slot_bytes(shapes, state)


def slot_bytes(
  shapes: Mapping[str, tuple[int, ...]], state: OptimizerState
) -> int:
  """Returns the size of all slots.

  Args:
    shapes: shapes of the parameters, or of a device's slices of them, by name.
    state: which slots there are.
  """
  return sum(
    DTYPE_BYTES[slot.dtype] * math.prod(shape[slot.dims])
    for name, shape in shapes.items()
    for slot in parameter_slots(name, len(shape), state)
  )


def check_same_slots(
  place: str, settings: Mapping[str, object], optimizer: AdafactorConfig
) -> None:
  """Raises UserError unless a checkpoint has the slots that a run needs.

  Args:
    place: the checkpoint's path.
    settings: settings of the run that wrote it, by macro.
    optimizer: settings of the run that wants to go on from it.
  """
  held = {
    field.name: settings.get(field.name.upper(), getattr(optimizer, field.name))
    for field in dataclasses.fields(optimizer)
  }
  for name in ("second_moment", "beta1", "momentum_dtype"):
    changed = dataclasses.replace(optimizer, **{name: held[name]})
    if optimizer_state(changed) != optimizer_state(optimizer):
      raise UserError(
        f"{name.upper()} = {getattr(optimizer, name)!r}: {place} was written "
        f"with {held[name]!r} and its moments are of no use here; go on with "
        "that, or start anew in another MODEL_DIR."
      )
