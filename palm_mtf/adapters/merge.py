# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Merges an adapter's factors into the kernels of its base, in float32.

The formulas are those of architecture/adapter.py. `xp` is numpy or TensorFlow.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from palm_mtf.architecture.adapter import PROMPT, column_factors
from palm_mtf.architecture.block import Projection, model_of
from palm_mtf.architecture.parameters import layer_name
from palm_mtf.config import ModelConfig

Reader = Callable[[str], np.ndarray]  # parameter's name -> its value, float32


def adapted_kernels(config: ModelConfig) -> dict[str, Projection]:
  """Returns {name of a kernel: the product with it} of adapted kernels."""
  return {
    f"{layer_name(i)}/{each.part}": each
    for i, layer in enumerate(model_of(config).layers)
    for each in layer.projections
    if each.low_rank
  }


def names_to_merge(kernel: str, of: Projection) -> list[str]:
  """Returns the names of W, A, B and, for DoRA, m."""
  layer = kernel.partition("/")[0]
  magnitude = [of.magnitude] if of.magnitude in of.vectors else []
  return [f"{layer}/{x}" for x in (of.part, *of.factors, *magnitude)]


def add_factors(xp: Any, of: Projection, w: Any, a: Any, b: Any) -> Any:
  """Returns W + s A B, [inputs..., outputs...]."""
  assert of.low_rank
  return w + of.low_rank.scale * xp.tensordot(a, b, 1)


def sum_squares(xp: Any, of: Projection, w: Any) -> Any:
  """Returns the sum of squares of each column of w, [outputs...]."""
  columns = w.shape[len(of.inputs) :]
  rows = xp.reshape(w, [-1, int(np.prod(columns))])
  return xp.reshape(xp.einsum("io,io->o", rows, rows), columns)


def scale_columns(xp: Any, w: Any, magnitude: Any, squares: Any) -> Any:
  """Returns m w / ||w||, given the result of `sum_squares`."""
  return w * column_factors(xp, magnitude, squares)


def merged_reader(config: ModelConfig, read: Reader) -> Reader:
  """Returns a reader of the parameters of `config.base`, with merged kernels.

  `read` reads the parameters of the base and of the adapter.
  """
  adapted = adapted_kernels(config)

  def read_merged(name: str) -> np.ndarray:
    if name not in adapted:
      return read(name)
    of = adapted[name]
    w, a, b, *magnitude = map(read, names_to_merge(name, of))
    w = add_factors(np, of, w, a, b)
    for m in magnitude:
      w = scale_columns(np, w, m, sum_squares(np, of, w))
    return w

  return read_merged


def initial_parameters(
  config: ModelConfig, read: Reader, seed: int
) -> Mapping[str, np.ndarray]:
  """Returns {name: value} of the parameters that begin as those of the base.

  These are DoRA's magnitudes, the norms of the base's columns, and the
  embeddings of "prompt", which are those of random tokens (Lester et al. 2021,
  3.1). `read` reads the parameters of the base.
  """
  if config.adapter == "prompt":
    table = read("embedding")
    count, rng = config.adapter_length, np.random.default_rng(seed)
    rows = rng.choice(len(table), count, replace=count > len(table))
    return {PROMPT: table[rows] * np.float32(config.embedding_scale)}
  return {
    names_to_merge(name, of)[-1]: np.sqrt(sum_squares(np, of, read(name)))
    for name, of in adapted_kernels(config).items()
    if of.magnitude in of.vectors
  }
