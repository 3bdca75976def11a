# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts the factors of adapters to those of other programs, and back.

An adapter makes a kernel W, [inputs, outputs], W + s A B
(architecture/adapter.py). Other programs store transposed factors: A^T, [rank,
inputs], and B^T, [outputs, rank]. Some classes join q, k and v in one kernel,
which has one pair of factors:

  A = [A_q | A_k | A_v]      B = [B_q  0   0 ]
                                 [ 0  B_k  0 ]
                                 [ 0   0  B_v]

This is exact: the product is that of each kernel. The rank is the sum of the
ranks, and scales by rank must be corrected.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf.adapters.merge import (
  adapted_kernels,
  names_to_merge,
  sum_squares,
)
from palm_mtf.architecture.block import Projection
from palm_mtf.architecture.parameters import parameter_shapes
from palm_mtf.config import ModelConfig
from palm_mtf.export.huggingface.families import Family
from palm_mtf.export.huggingface.weights import (
  find_tensors,
  join_outputs,
  permute_heads,
  split_outputs,
)

Read = Callable[[str], np.ndarray]


class Factors(NamedTuple):
  """The adapter of a kernel or of joined kernels, float32."""

  a: np.ndarray  # [inputs, rank]; of our kernels [inputs..., rank]
  b: np.ndarray  # [rank, outputs]; of our kernels [rank, outputs...]
  magnitude: np.ndarray | None = None  # [outputs] or [outputs...]; for DoRA


class AdaptedModule(NamedTuple):
  """A kernel of another program that an adapter changes."""

  kernels: list[str]  # our kernels that it joins
  adapted: list[str]  # those that the adapter changes
  inputs: int
  outputs: int

  def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the shapes of A^T and B^T."""
    return (rank, self.inputs), (self.outputs, rank)


def all_kernels(model: ModelConfig) -> dict[str, Projection]:
  """Returns {kernel: the product with it} of those that may be adapted.

  `model` has an adapter, whose ADAPTER_TARGETS are ignored.
  """
  return adapted_kernels(dataclasses.replace(model, adapter_targets=()))


def find_modules(
  model: ModelConfig, family: Family
) -> dict[str, AdaptedModule]:
  """Returns {tensor of the class: its kernels} of those that are adapted."""
  changed, every = adapted_kernels(model), all_kernels(model)
  shapes, found = parameter_shapes(model.base), {}
  for theirs, names in find_tensors(model.base, family).items():
    if adapted := [x for x in names if x in changed]:
      num = len(every[names[0]].inputs)
      inputs = math.prod(shapes[names[0]][:num])
      outputs = sum(math.prod(shapes[x]) for x in names) // inputs
      found[theirs] = AdaptedModule(names, adapted, inputs, outputs)
  return found


def join_factors(
  module: AdaptedModule, model: ModelConfig, family: Family, read: Read
) -> Factors:
  """Returns the factors of a module, in the order of the class.

  `read` returns the parameter of the base or of the adapter that has a name.
  """
  assert model.adapter_rank
  every, rank = all_kernels(model), model.adapter_rank
  a, b, magnitudes = [], [], []
  for name in module.kernels:
    of = every[name]
    w, own_a, own_b, *magnitude = names_to_merge(name, of)
    width = math.prod(parameter_shapes(model.base)[name][len(of.inputs) :])
    rows = np.zeros([rank * len(module.adapted), width], np.float32)
    if name in module.adapted:
      begin = rank * len(a)
      rows[begin : begin + rank] = read(own_b).reshape(rank, width)
      a.append(read(own_a).reshape(-1, rank))
    b.append(permute_heads(rows, name, model, family))
    for m in magnitude:
      is_own = name in module.adapted
      value = read(m) if is_own else np.sqrt(sum_squares(np, of, read(w)))
      value = permute_heads(value.reshape(-1), name, model, family)
      magnitudes.append(value)

  def join(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else join_outputs(parts, model, family)

  joined = join(magnitudes) if magnitudes else None
  return Factors(np.concatenate(a, -1), join(b), joined)


def split_factors(
  factors: Factors, kernels: Sequence[str], model: ModelConfig, family: Family
) -> dict[str, Factors]:
  """Returns {kernel: its factors} of a module; undoes `join_factors`.

  Of joined kernels, each keeps only those rows of B that are not zero, and the
  columns of A that these rows multiply.
  """
  shapes, every = parameter_shapes(model.base), all_kernels(model)
  wide = {x: shapes[x][len(every[x].inputs) :] for x in kernels}
  is_joined = len(kernels) > 1

  def split(value: np.ndarray) -> Mapping[str, np.ndarray]:
    rows = value.shape[:-1]
    parts = [value]
    if is_joined:
      wanted = [(*rows, *x) for x in wide.values()]
      parts = split_outputs(value, wanted, model, family)
    flat = [x.reshape(*rows, -1) for x in parts]
    return {
      name: permute_heads(x, name, model, family, is_import=True)
      for name, x in zip(kernels, flat, strict=True)
    }

  b = split(factors.b)
  m = {} if factors.magnitude is None else split(factors.magnitude)
  found = {}
  for name in kernels:
    own_a, own_b = factors.a, b[name]
    if is_joined:
      used = own_b.any(axis=1)
      own_a, own_b = own_a[:, used], own_b[used]
    inputs, rank = shapes[name][: len(every[name].inputs)], len(own_b)
    found[name] = Factors(
      own_a.reshape(*inputs, rank),
      own_b.reshape(rank, *wide[name]),
      m[name].reshape(wide[name]) if m else None,
    )
  return found
