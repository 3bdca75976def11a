# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Parameters of a model: the name and the shape of each, and how many.

The paper's counts (PaLM Table 1) leave the norms' scales out and count the tied
embedding once:

  N = vocab d_model + num_layers (2 d_model heads d_kv     q and o
                                  + 2 d_model d_kv         k and v
                                  + 3 d_model d_ff)        wi_gate, wi and wo

with k and v as large as q in multi-head attention. Names and shapes are the
checkpoint's schema; model/palm.py makes the variables.
"""

import math

from palm_mtf.config import PalmConfig


def parameter_shapes(config: PalmConfig) -> dict[str, tuple[int, ...]]:
  """Returns the shape of every parameter, in the order of creation.

  Args:
    config: the architecture.

  Returns:
    {"embedding": (vocab, d_model), "layer_000/norm/scale": (d_model,), ...}.
  """
  shapes = {"embedding": (config.vocab_size, config.d_model)}
  for layer in range(config.num_layers):
    for name, shape in _layer_shapes(config).items():
      shapes[f"layer_{layer:03d}/{name}"] = shape
  shapes["final_norm/scale"] = (config.d_model,)
  return shapes


def _layer_shapes(config: PalmConfig) -> dict[str, tuple[int, ...]]:
  heads = (config.num_heads, config.d_kv)
  kv_heads = heads if config.attention == "multi_head" else heads[1:]
  shapes = {
    "norm/scale": (config.d_model,),
    "attention/q": (config.d_model, *heads),
    "attention/k": (config.d_model, *kv_heads),
    "attention/v": (config.d_model, *kv_heads),
    "attention/o": (*heads, config.d_model),
  }
  if config.block == "serial":
    shapes["mlp_norm/scale"] = (config.d_model,)
  return {
    **shapes,
    "mlp/wi_gate": (config.d_model, config.d_ff),
    "mlp/wi": (config.d_model, config.d_ff),
    "mlp/wo": (config.d_ff, config.d_model),
  }


def count_parameters(config: PalmConfig) -> int:
  """Returns the number of parameters as the paper counts: no norm scales."""
  return _count(config, scales=False)


def count_norm_scales(config: PalmConfig) -> int:
  """Returns the number of parameters that `count_parameters` leaves out."""
  return _count(config, scales=True)


def _count(config: PalmConfig, scales: bool) -> int:
  return sum(
    math.prod(shape)
    for name, shape in parameter_shapes(config).items()
    if name.endswith("/scale") == scales
  )
