# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""LoRA (Hu et al. 2022) and DoRA (Liu et al. 2024) in float64 NumPy.

Written from the papers: an adapted model is the model whose kernels are W + s A
B or, for DoRA, m (W + s A B) / ||W + s A B||, so the oracle of models
(oracle.py) needs no change.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from tests import oracle
from tests.blocks import Z_LOSS, Case, block_config
from tests.mtf_testing import random_tokens

# {name in a layer: (letters of inputs, letters of outputs)} in np.einsum; e is
# one dimension of many, such as heads and d_kv.
_INPUTS = {"o": 2}


def kernels(config, targets) -> list[str]:
  """Returns the names of the kernels that `targets`, last words, name."""
  base = oracle.parameter_shapes(config.base)
  return [x for x in base if x.rpartition("/")[2] in targets]


def random_adapter(config, names, seed: int) -> dict[str, np.ndarray]:
  """Returns A, B and, for DoRA, m of each kernel in `names`."""
  rng = np.random.default_rng(seed)
  shapes, found = oracle.parameter_shapes(config.base), {}
  for name in names:
    num = _INPUTS.get(name.rpartition("/")[2], 1)
    inputs, outputs = shapes[name][:num], shapes[name][num:]
    rank = config.adapter_rank
    size = 1 / math.sqrt(math.prod(inputs))
    found[f"{name}_lora_a"] = size * rng.standard_normal([*inputs, rank])
    found[f"{name}_lora_b"] = rng.standard_normal([rank, *outputs])
    if config.adapter == "dora":
      found[f"{name}_magnitude"] = rng.uniform(0.5, 1.5, outputs)
  return {x: np.float32(y) for x, y in found.items()}


def scale_of(config) -> float:
  """Returns the factor of A B."""
  rank = config.adapter_rank
  if config.adapter_scale == "sqrt_rank":
    return config.adapter_alpha / math.sqrt(rank)
  return config.adapter_alpha / rank


def direction(config, params, name: str) -> np.ndarray:
  """Returns W + s A B."""
  a, b = (np.float64(params[f"{name}_lora_{x}"]) for x in "ab")
  product = a.reshape(-1, a.shape[-1]) @ b.reshape(b.shape[0], -1)
  w = np.float64(params[name])
  return w + scale_of(config) * product.reshape(w.shape)


def norms_of(config, params, name: str) -> np.ndarray:
  """Returns the norm of each column of W + s A B, over its inputs."""
  num = _INPUTS.get(name.rpartition("/")[2], 1)
  square = direction(config, params, name) ** 2
  return np.sqrt(square.sum(axis=tuple(range(num))))


def merge(
  config, params, norms: Mapping[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
  """Returns the parameters of the base with the adapter merged into them.

  `norms` has columns' norms by kernel, where a gradient takes them as
  constants; None computes them.
  """
  found = {}
  for name in oracle.parameter_shapes(config.base):
    found[name] = params[name]
    if f"{name}_lora_a" in params:
      found[name] = direction(config, params, name)
    if f"{name}_magnitude" in params:
      norm = norms_of(config, params, name) if norms is None else norms[name]
      found[name] = found[name] * (params[f"{name}_magnitude"] / norm)
  return found


def slopes_of(losses, params, names) -> dict:
  """Returns {name: (a random direction, the slope of the loss along it)}.

  `losses` takes parameters.
  """
  rng, slopes = np.random.default_rng(3), {}
  for key in names:
    along = rng.standard_normal(params[key].shape)
    # Central differences in float64 are exact to about 1e-9.
    step = 1e-5 / np.linalg.norm(along)
    up, down = (
      sum(losses({**params, key: params[key] + sign * step * along}))
      for sign in (1, -1)
    )
    slopes[key] = along, (up - down) / (2 * step)
  return slopes


def make_case(block: str, targets, rows=random_tokens, **settings) -> Case:
  """Returns a model with an adapter and a batch, with the oracle's numbers.

  `targets` are the last words of adapted kernels; `slopes` are only those of
  the adapter. `settings` are changes of the model.
  """
  settings = {
    "adapter": "lora",
    "adapter_rank": 3,
    "adapter_alpha": 2.0,
    **settings,
  }
  config = block_config(block, **settings)
  names = kernels(config, targets)
  config = dataclasses.replace(
    config, adapter_targets=sorted({x.partition("/")[2] for x in names})
  )
  base = oracle.random_parameters(config.base, seed=1)
  params = {**base, **random_adapter(config, names, seed=4)}
  batch = rows(config, batch_size=2, seed=2)
  norms = {x: norms_of(config, params, x) for x in names}

  def losses(params):
    merged = merge(config, params, norms)
    return oracle.loss(config.base, merged, **batch, z_loss=Z_LOSS)

  slopes = slopes_of(losses, params, params.keys() - base.keys())
  given = (batch.get(x) for x in ("inputs", "segments", "prefix"))
  merged = merge(config, params)
  logits = oracle.forward(config.base, merged, *given, {})
  return Case(config, params, batch, logits, losses(params), slopes, {})


def is_factor(name: str) -> bool:
  """Returns whether a parameter is A, B or m."""
  return name.endswith(("_lora_a", "_lora_b", "_magnitude"))
