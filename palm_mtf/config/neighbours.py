# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks that other settings fit a model that attends to neighbours."""

from palm_mtf.config.data import DataConfig
from palm_mtf.config.model import ModelConfig
from palm_mtf.errors import UserError


def num_neighbours(model: ModelConfig) -> int:
  """Returns how many neighbours a chunk has; 0 if no layer attends to any."""
  found = {model.variant(x).neighbours for x in {*model.variant_names}}
  return max(found or {model.neighbours})


def neighbour_tokens(model: ModelConfig) -> int:
  """Returns the number of tokens of all neighbours of a row; 0 for none."""
  chunks = model.sequence_length // model.chunk_length
  return chunks * num_neighbours(model) * 2 * model.chunk_length


def refuse_neighbours(model: ModelConfig, what: str) -> None:
  """Raises UserError if layers attend to neighbours; `what` finds none."""
  if count := num_neighbours(model):
    raise UserError(
      f"NEIGHBOURS = {count}: {what} finds no neighbours of a text, as only "
      "train, evaluate and score do; use a model without NEIGHBOURS."
    )


def check_neighbours(model: ModelConfig, data: DataConfig) -> None:
  """Raises UserError if a setting does not fit NEIGHBOURS."""
  count, length = num_neighbours(model), model.chunk_length
  index, row = data.neighbour_index, model.sequence_length
  if (index is None) != (count == 0):
    raise UserError(
      f"NEIGHBOURS = {count} and NEIGHBOUR_INDEX = {index!r}: set both, or "
      "neither; palm_mtf index chunks makes the index."
    )
  if not count:
    return
  counts = {model.variant(x).neighbours for x in model.variant_names}
  for macro, value, values in (
    ("NEIGHBOURS", min(counts - {0}, default=count), (count,)),
    ("OBJECTIVE", model.objective, ("causal",)),
    ("POSITIONS", model.positions, ("rotary", "none")),
    ("NUM_EXPERTS", model.num_experts, (None,)),
    ("ADAPTER", model.adapter, ("none",)),
    ("MODEL_FUNCTION", model.model_function, ("",)),
    # Masks hide other documents of a row, but not the neighbours of a chunk
    # that begins in another document.
    ("PACKING", data.packing, ("joined",)),
  ):
    if value not in values:
      raise UserError(
        f"NEIGHBOURS = {count} and {macro} = {value!r}: do not go together; "
        f"set {macro} to {' or '.join(map(repr, values))}."
      )
  if row % length:
    raise UserError(
      f"SEQUENCE_LENGTH = {row:,} and CHUNK_LENGTH = {length}: a row has whole "
      f"chunks; set SEQUENCE_LENGTH = {max(row - row % length, length)}."
    )
