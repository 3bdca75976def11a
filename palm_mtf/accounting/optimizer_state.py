# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Optimizer slots, the optimizer's variables per parameter: dims and bytes.

The settings of each optimizer say which slots it keeps (palm_mtf/config/).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from palm_mtf.architecture.parameters import frozen_names, parse_name
from palm_mtf.config import OPTIMIZERS, OptimizerConfig
from palm_mtf.errors import UserError

# SECOND_MOMENT of a checkpoint without slots, such as imported weights.
NO_MOMENTS = "none"
# What messages advise if a run cannot take over the optimizer of a checkpoint.
NEW_OPTIMIZER = (
  "start a new optimizer from its weights in another MODEL_DIR, as "
  'INIT_CHECKPOINT with INIT_STATE = "weights"'
)
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class Slot:
  """One optimizer slot of a parameter."""

  name: str  # such as "momentum"; variables are named <parameter>/<name>
  dims: slice  # the dimensions of the parameter that the slot has
  dtype: str  # "float32" or "bfloat16"


def row_rank(parameter: str) -> int:
  """Returns how many leading dimensions of a matrix are its rows."""
  # A product x w sums over the rows of w: q [d_model, heads, d_kv] has d_model
  # rows, and o [heads, d_kv, d_model] has heads * d_kv rows. Kernels of experts
  # are one matrix with the rows of all experts.
  name = parse_name(parameter)
  return 2 if name.part == "attention/o" or name.is_expert else 1


def parameter_slots(
  parameter: str, rank: int, optimizer: OptimizerConfig
) -> list[Slot]:
  """Returns the slots of a parameter with `rank` dimensions."""
  if parse_name(parameter).is_state:
    return []
  rows = row_rank(parameter)
  dims = {
    "all": slice(0, rank),
    "rows": slice(0, rows),
    "columns": slice(rows, rank),
  }
  found = optimizer.slots(rank, parse_name(parameter).is_kernel)
  return [Slot(name, dims[of], dtype) for name, of, dtype in found]


def num_own(settings: Mapping[str, object]) -> int:
  """Returns how many pods have own parameters and slots.

  `settings` is {macro: value} of a run; pods that exchange gradients are equal.
  """
  own = settings["NUM_PODS"] if settings.get("EXCHANGE") == "diloco" else 0
  assert isinstance(own, int)
  return own


def checkpoint_bytes(
  shapes: Mapping[str, tuple[int, ...]],
  optimizer: OptimizerConfig | None = None,
  frozen: Sequence[str] = (),
  num_own: int = 0,
) -> int:
  """Returns the bytes of float32 parameters and their optimizer slots.

  If `optimizer` is None, returns the most that any optimizer needs: two slots.
  Parameters that `frozen`, the patterns of FROZEN, matches have no slots. For
  `num_own` pods (see the function) there are outer parameters and momentum too.
  """

  def add_up(some: Mapping[str, tuple[int, ...]]) -> int:
    return sum(4 * math.prod(shape) for shape in some.values())

  without = frozen_names(shapes, frozen)
  trained = {x: shape for x, shape in shapes.items() if x not in without}
  slots = slot_bytes(trained, optimizer) if optimizer else 2 * add_up(shapes)
  if not num_own:
    return add_up(shapes) + slots
  return add_up(shapes) + add_up(trained) * (1 + num_own) + num_own * slots


def slot_bytes(
  shapes: Mapping[str, tuple[int, ...]], optimizer: OptimizerConfig
) -> int:
  """Returns the bytes of slots for parameters, or for slices of parameters."""
  return sum(
    DTYPE_BYTES[slot.dtype] * math.prod(shape[slot.dims])
    for name, shape in shapes.items()
    for slot in parameter_slots(name, len(shape), optimizer)
  )


def check_same_slots(
  place: str, settings: Mapping[str, object], optimizer: OptimizerConfig
) -> None:
  """Raises UserError unless a checkpoint has the slots that a run needs.

  A run with `settings` ({macro: value}) wrote the checkpoint, which is at
  `place`. The run that resumes from it has the settings `optimizer`.
  """
  # Learners keep the moments.
  if settings.get("SECOND_MOMENT") == NO_MOMENTS or settings.get("LEARNERS"):
    raise UserError(
      f"{place}: has only weights, without the moments of an optimizer; "
      f"{NEW_OPTIMIZER}."
    )
  # Earlier versions had only one optimizer.
  held = {"OPTIMIZER": next(iter(OPTIMIZERS)), **settings}
  # Settings are compared one by one, so that the message names the setting that
  # differs. A checkpoint of an earlier version may lack a setting. Assume the
  # run's value, so that the run can resume.
  for name in ("optimizer", *optimizer.slot_settings):
    now = getattr(optimizer, name)
    before = held.get(name.upper(), now)
    # BETA1 may change, but not to or from a value without momentum.
    if before != now and (
      name == "optimizer"
      or _kinds(dataclasses.replace(optimizer, **{name: before}))
      != _kinds(optimizer)
    ):
      # A user who chooses another optimizer does not want the old one.
      keep = "" if name == "optimizer" else "keep that value, or "
      raise UserError(
        f"{name.upper()} = {now!r}: {place} was written with {before!r}, so "
        f"its moments do not fit; {keep}{NEW_OPTIMIZER}."
      )


def _kinds(optimizer: OptimizerConfig) -> list[list[tuple[str, str, str]]]:
  """Returns the slots of a kernel and of a vector."""
  return [optimizer.slots(2, is_kernel=True), optimizer.slots(1, False)]
