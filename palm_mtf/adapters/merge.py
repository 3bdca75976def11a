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


def sum_squares(xp: Any, of: Projection, w: Any) -> Any:
  """Returns the sum of squares of each column of w, [outputs...]."""
  columns = w.shape[len(of.inputs) :]
  rows = xp.reshape(w, [-1, int(np.prod(columns))])
  return xp.reshape(xp.einsum("io,io->o", rows, rows), columns)


def merged_reader(
  config: ModelConfig,
  read: Callable[[str], Any],
  xp: Any = np,
  call: Callable[..., Any] = lambda function, *x: function(*x),
  allreduce: Callable[[Any, Projection], Any] = lambda squares, of: squares,
) -> Callable[[str], Any]:
  """Returns a reader of the parameters of `config.base`, with merged kernels.

  Args:
    read: reads the parameters of the base and of the adapter.
    call: applies a function of `xp` to each slice of what `read` returns.
    allreduce: sums over the slices the squares of columns of a kernel.
  """
  adapted = adapted_kernels(config)

  def read_merged(name: str) -> Any:
    if name not in adapted:
      return read(name)
    of = adapted[name]
    assert of.low_rank
    scale = of.low_rank.scale
    w, a, b, *magnitude = map(read, names_to_merge(name, of))
    w = call(lambda w, a, b: w + scale * xp.tensordot(a, b, 1), w, a, b)
    for m in magnitude:
      squares = allreduce(call(lambda w: sum_squares(xp, of, w), w), of)
      w = call(lambda w, *x: w * column_factors(xp, *x), w, m, squares)
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
