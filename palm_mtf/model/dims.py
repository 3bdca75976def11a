# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The dimensions that every tensor of the model is made of: the glossary.

  batch          sequences in one step of one pod
  length         positions that ask: queries, and everything between layers
  memory_length  positions that are attended to: `length` by another name,
                 because one tensor cannot have the same dimension twice
  d_model        the residual stream
  heads          query heads; keys and values have none in multi-query attention
  d_kv           one head; rotary turns its first half against its second
  d_ff           the hidden layer of the MLP
  vocab          token types: rows of the tied embedding

Layout rules name these dimensions; the macros that size them are in upper case.
"""

import dataclasses

from palm_mtf._tf import mtf
from palm_mtf.config import PalmConfig


@dataclasses.dataclass(frozen=True)
class Dims:
  """Each field is the mtf.Dimension of that name."""

  batch: mtf.Dimension
  length: mtf.Dimension
  memory_length: mtf.Dimension
  d_model: mtf.Dimension
  heads: mtf.Dimension
  d_kv: mtf.Dimension
  d_ff: mtf.Dimension
  vocab: mtf.Dimension


def model_dims(config: PalmConfig, batch_size: int) -> Dims:
  """Returns the dimensions of `config` for `batch_size` sequences."""
  return Dims(
    batch=mtf.Dimension("batch", batch_size),
    length=mtf.Dimension("length", config.sequence_length),
    memory_length=mtf.Dimension("memory_length", config.sequence_length),
    d_model=mtf.Dimension("d_model", config.d_model),
    heads=mtf.Dimension("heads", config.num_heads),
    d_kv=mtf.Dimension("d_kv", config.d_kv),
    d_ff=mtf.Dimension("d_ff", config.d_ff),
    vocab=mtf.Dimension("vocab", config.vocab_size),
  )
