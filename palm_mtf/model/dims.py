# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Glossary: the dimensions of the model's tensors."""

import dataclasses

from palm_mtf._tf import mtf
from palm_mtf.architecture.parameters import dimension_sizes
from palm_mtf.config import MeshLayout, ModelConfig


@dataclasses.dataclass(frozen=True)
class Dims:
  """Dimensions of tensors, under the names that layout rules use."""

  batch: mtf.Dimension  # sequences in one forward pass of a pod
  # Positions: of queries, and of keys and values. The names differ, because
  # scores [length, memory_length] cannot have one dimension twice.
  length: mtf.Dimension
  memory_length: mtf.Dimension
  # Width of the residual stream. It has three names, so that a layout can split
  # each differently: d_model_stored in weights while no layer uses them,
  # d_model_residual in the residual stream between two blocks, and d_model
  # elsewhere. A name that the layout does not split is replaced by d_model.
  d_model: mtf.Dimension
  d_model_stored: mtf.Dimension
  d_model_residual: mtf.Dimension
  # Query heads. In multi-query attention keys and values lack this dimension.
  heads: mtf.Dimension
  # Heads of keys and values in grouped-query attention. The dimension is named
  # "heads" too, so that the same layout rule splits both.
  kv_heads: mtf.Dimension
  d_kv: mtf.Dimension  # width of one head
  d_ff: mtf.Dimension  # width of the hidden layer of the MLP
  # Widths of an expert, and of the MLP of all shared experts. The dimensions
  # are named "d_ff" too, so that the same layout rule splits all three.
  d_expert: mtf.Dimension
  d_shared: mtf.Dimension
  experts: mtf.Dimension  # stacked experts
  router: mtf.Dimension  # scores, one per expert; no rule splits them
  # Rows of the embedding tables: one per token of the vocabulary, padded to a
  # multiple of the size of the mesh axis that splits the rows.
  vocab: mtf.Dimension
  positions: mtf.Dimension  # rows of the table of learned positions
  buckets: mtf.Dimension  # T5's ranges of distances, with one bias per range
  rank: mtf.Dimension  # of an adapter; no rule splits it
  virtual: mtf.Dimension  # virtual positions of an adapter; no rule splits them
  layout: MeshLayout  # what splits the dimensions


def model_dims(config: ModelConfig, batch_size: int, mesh: MeshLayout) -> Dims:
  """Returns the dimensions of `config` for `batch_size` sequences on a mesh."""
  sizes = {
    **dimension_sizes(config),
    "batch": batch_size,
    "length": config.sequence_length,
    "memory_length": config.sequence_length,
    "vocab": mesh.padded_vocab_size(config.vocab_size),
  }
  dims = {name: mtf.Dimension(name, size) for name, size in sizes.items()}
  dims["kv_heads"] = mtf.Dimension("heads", config.key_heads)
  for name in ("d_expert", "d_shared"):
    dims[name] = mtf.Dimension("d_ff", sizes[name])
  for name in ("d_model_stored", "d_model_residual"):
    # A name that is not split becomes d_model: sharding.py adds no operation.
    is_split = mesh.axis_size_of(name) > 1
    dims[name] = mtf.Dimension(name if is_split else "d_model", config.d_model)
  return Dims(**dims, layout=mesh)
