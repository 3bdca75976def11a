# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Parameters of a model: names and shapes, the schema of checkpoints."""

import dataclasses
import math

from palm_mtf.config.model import PalmConfig
from palm_mtf.config.parameter_names import layer_name, parsed


def parameter_shapes(config: PalmConfig) -> dict[str, tuple[int, ...]]:
  """Returns the shape of every parameter, by name, in the order of creation."""
  # {"embedding": (vocab, d_model), "layer_000/norm/scale": (d_model,), ...}
  sizes = {
    "vocab": config.vocab_size,
    "d_model": config.d_model,
    "heads": config.num_heads,
    "d_kv": config.d_kv,
    "d_ff": config.d_ff,
  }
  return {
    name: tuple(sizes[dim] for dim in dims)
    for name, dims in parameter_dims(config).items()
  }


def distinct_parameters(
  config: PalmConfig,
) -> list[tuple[str, tuple[int, ...], int]]:
  """Returns name and shape of every parameter of one layer, and of none.

  The third is how many there are alike: the number of layers, or 1. Sums over
  them take as long for any number of layers.
  """
  one_layer = dataclasses.replace(config, num_layers=1)
  return [
    (name, shape, 1 if parsed(name).layer is None else config.num_layers)
    for name, shape in parameter_shapes(one_layer).items()
  ]


def parameter_dims(config: PalmConfig) -> dict[str, tuple[str, ...]]:
  """Returns the dimension names of every parameter, in that order."""
  dims = {"embedding": ("vocab", "d_model")}
  for layer in range(config.num_layers):
    for name, layer_dims in _layer_dims(config).items():
      dims[f"{layer_name(layer)}/{name}"] = layer_dims
  if config.final_norm_scale == "learned":
    dims["final_norm/scale"] = ("d_model",)
  return dims


def _layer_dims(config: PalmConfig) -> dict[str, tuple[str, ...]]:
  heads = ("heads", "d_kv")
  # Multi-query attention has one head of keys and values.
  kv_heads = heads if config.attention == "multi_head" else heads[1:]
  dims = {
    "norm/scale": ("d_model",),
    "attention/q": ("d_model", *heads),
    "attention/k": ("d_model", *kv_heads),
    "attention/v": ("d_model", *kv_heads),
    "attention/o": (*heads, "d_model"),
  }
  if config.block == "serial":
    dims["mlp_norm/scale"] = ("d_model",)
  return {
    **dims,
    "mlp/wi_gate": ("d_model", "d_ff"),
    "mlp/wi": ("d_model", "d_ff"),
    "mlp/wo": ("d_ff", "d_model"),
  }


def count_parameters(config: PalmConfig) -> int:
  """Returns the number of parameters without norm scales (PaLM Table 1)."""
  # vocab d_model + num_layers (2 d_model heads d_kv     q and o
  #                             + 2 d_model d_kv         k and v
  #                             + 3 d_model d_ff)        wi_gate, wi and wo
  return _count(config, scales=False)


def count_norm_scales(config: PalmConfig) -> int:
  """Returns the number of parameters that `count_parameters` leaves out."""
  return _count(config, scales=True)


def _count(config: PalmConfig, scales: bool) -> int:
  return sum(
    math.prod(shape) * n
    for name, shape, n in distinct_parameters(config)
    if parsed(name).is_scale == scales
  )
