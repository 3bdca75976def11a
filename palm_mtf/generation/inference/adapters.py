# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters that the texts of a decoder name, each its own.

The base is not merged: C++ operations keep the factors (native/adapters.py).
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from palm_mtf.adapters.merge import Reader, adapted_kernels, names_to_merge
from palm_mtf.architecture.parameters import parameter_shapes
from palm_mtf.config import ModelConfig
from palm_mtf.generation.decode.weights import joined_kernels


@dataclasses.dataclass(frozen=True, eq=False)
class Adapter:
  """An adapter that a decoder keeps as long as this object is referenced."""

  number: int  # 0 for the base


BASE = Adapter(0)


class Factors(NamedTuple):
  """All factors of an adapter, as `keep_adapter` takes them."""

  parts: np.ndarray  # [kernels, 6], int32
  values: np.ndarray  # float32


def find_factors(config: ModelConfig, read: Reader) -> Factors:
  """Returns the factors of an adapter of the kind "lora".

  `config` is the base with the settings of the adapter. `read` returns the
  adapter's parameter of a name, float32.
  """
  adapted, shapes = adapted_kernels(config), parameter_shapes(config.base)
  products = [
    each
    for layer in range(config.num_layers)
    for each in joined_kernels(config.base, layer, is_packed=True)
  ]
  parts, values = [np.zeros([0, 6], np.int32)], [np.zeros([0], np.float32)]
  for product, (names, summed) in enumerate(products):
    first = 0  # of the columns in an input kernel, or the rows in an output one
    for name in names:
      shape = shapes[name][:-1] if summed else shapes[name][1:]
      size = math.prod(shape)
      at = (first, 0) if summed else (0, first)
      first += size
      if not (of := adapted.get(name)):
        continue
      assert of.low_rank
      rank = of.low_rank.rank
      a, b = map(read, names_to_merge(name, of)[1:])
      a, b = a.reshape([-1, rank]), b.reshape([rank, -1])
      used = b.any(1)  # other ranks add nothing, such as those of padding
      a, b = a[:, used], np.float32(of.low_rank.scale) * b[used]
      if not len(b):
        continue
      part = product, at[0], len(a), len(b), at[1], b.shape[1]
      parts.append(np.array([part], np.int32))
      values += [a.T.ravel(), b.ravel()]
  return Factors(np.concatenate(parts), np.concatenate(values))


NOTHING = Factors(np.zeros([0, 6], np.int32), np.zeros([0], np.float32))
