# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The dimensions that every tensor of the model is made of: the glossary."""

import dataclasses

from palm_mtf._tf import mtf
from palm_mtf.config import MeshLayout, PalmConfig


@dataclasses.dataclass(frozen=True)
class Dims:
  """Dimensions by the names that layout rules use.

  Macros size them in upper case.
  """

  # Sequences in one step of one pod.
  batch: mtf.Dimension
  # Positions that attend; and positions that are attended to, the same ones by
  # another name, because one tensor cannot have a dimension twice.
  length: mtf.Dimension
  memory_length: mtf.Dimension
  # Residual stream; by other names, where a layout splits these, in weights
  # that no layer uses just then and in what lies between two blocks.
  d_model: mtf.Dimension
  d_model_stored: mtf.Dimension
  d_model_residual: mtf.Dimension
  # Query heads; keys and values have none in multi-query attention.
  heads: mtf.Dimension
  # One head; rotary embedding turns its first half against its second.
  d_kv: mtf.Dimension
  # Hidden layer of the MLP.
  d_ff: mtf.Dimension
  # Token types: rows of the tied embedding, and as many rows of padding as make
  # the number divisible by the mesh axis.
  vocab: mtf.Dimension


def model_dims(config: PalmConfig, batch_size: int, mesh: MeshLayout) -> Dims:
  """Returns the dimensions of `config` for `batch_size` sequences on a mesh."""
  vocab_size = mesh.padded_vocab_size(config.vocab_size)

  def d_model_as(name: str) -> mtf.Dimension:
    # No other name where nothing is split: then nothing is renamed either.
    is_split = mesh.axis_size_of(name) > 1
    return mtf.Dimension(name if is_split else "d_model", config.d_model)

  return Dims(
    batch=mtf.Dimension("batch", batch_size),
    length=mtf.Dimension("length", config.sequence_length),
    memory_length=mtf.Dimension("memory_length", config.sequence_length),
    d_model=mtf.Dimension("d_model", config.d_model),
    d_model_stored=d_model_as("d_model_stored"),
    d_model_residual=d_model_as("d_model_residual"),
    heads=mtf.Dimension("heads", config.num_heads),
    d_kv=mtf.Dimension("d_kv", config.d_kv),
    d_ff=mtf.Dimension("d_ff", config.d_ff),
    vocab=mtf.Dimension("vocab", vocab_size),
  )
