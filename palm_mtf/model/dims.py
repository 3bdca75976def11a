# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The dimensions that every tensor of the model is made of: the glossary.

  batch          sequences in one step of one pod
  length         positions that ask: queries, and everything between layers
  memory_length  positions that are attended to: `length` by another name,
                 because one tensor cannot have the same dimension twice
  d_model        the residual stream
  d_model_stored, d_model_residual
                 d_model by other names where a layout splits these: of weights
                 that no layer uses just then, and of what is between two blocks
  heads          query heads; keys and values have none in multi-query attention
  d_kv           one head; rotary turns its first half against its second
  d_ff           the hidden layer of the MLP
  vocab          token types: rows of the tied embedding, and as many behind
                 them as make the number divisible by the mesh axis

Layout rules name these dimensions; the macros that size them are in upper case.
"""

import dataclasses

from palm_mtf._tf import mtf
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import PalmConfig


@dataclasses.dataclass(frozen=True)
class Dims:
  """Each field is the mtf.Dimension of that name."""

  batch: mtf.Dimension
  length: mtf.Dimension
  memory_length: mtf.Dimension
  d_model: mtf.Dimension
  d_model_stored: mtf.Dimension
  d_model_residual: mtf.Dimension
  heads: mtf.Dimension
  d_kv: mtf.Dimension
  d_ff: mtf.Dimension
  vocab: mtf.Dimension


def model_dims(config: PalmConfig, batch_size: int, mesh: MeshLayout) -> Dims:
  """Returns the dimensions of `config` for `batch_size` sequences on a mesh."""
  vocab_size = mesh.padded_vocab_size(config.vocab_size)

  def d_model_as(name: str) -> mtf.Dimension:
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
