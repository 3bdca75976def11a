# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Names, shapes and numbers of parameters; blocks of attention.

Checkpoints have parameters of these names:

embedding               the table of input and output embeddings (tied)
layer_007/attention/q   a kernel
layer_007/norm/scale    the scale of a norm
final_norm/scale        the scale of the last norm

Names in Mesh TensorFlow's own layers end with the same words, such as
"encoder/block_000/layer_000/SelfAttention/q" and "shared/embedding".
"""

import dataclasses
import functools
import math
import re
from typing import NamedTuple

from palm_mtf.config import PalmConfig

# Numbers have at least three digits, so that names sort by layer (up to 999).
_IN_LAYER = re.compile(r"layer_(\d{3,})/(.+)")


class ParameterName(NamedTuple):
  """The name of a parameter, split into the layer's number and the rest."""

  # Number of the layer, from 0; None for a parameter outside the layers.
  layer: int | None
  # Name within the layer, such as "attention/q"; the whole name for a parameter
  # outside the layers.
  part: str

  @property
  def kind(self) -> str:
    """Kind of parameter, for PaLM "embedding", "norm", "attention" or "mlp"."""
    first = self.part.partition("/")[0]  # for a norm: "norm", "mlp_norm", ...
    return "norm" if first.endswith("norm") else first

  @property
  def last(self) -> str:
    """The text after the last slash, such as "q" for "attention/q"."""
    return self.part.rpartition("/")[2]

  @property
  def is_kernel(self) -> bool:
    """Whether the parameter is a kernel, not an embedding, scale or bias."""
    return not self.is_scale and not self.last.endswith(("embedding", "bias"))

  @property
  def is_scale(self) -> bool:
    """Whether the parameter is the scale of a norm."""
    return self.last == "scale"


def layer_name(layer: int) -> str:
  """Returns the prefix of a layer's parameter names, such as "layer_007"."""
  return f"layer_{layer:03d}"


def parse_name(name: str) -> ParameterName:
  """Splits a parameter's name, such as "layer_007/attention/q"."""
  match = _IN_LAYER.fullmatch(name)
  return (
    ParameterName(int(match[1]), match[2])
    if match
    else ParameterName(None, name)
  )


# On CPUs without a C++ compiler, blocks of 128 positions are the fastest
# (`python -m tools.bench attention`). Each block is compiled separately, so
# sequences of more than _LONG positions have fewer and larger blocks, to limit
# compilation time.
_SMALL, _LARGE, _LONG = 128, 512, 2048


class AttentionBlock(NamedTuple):
  """A range of queries, and the keys that they read."""

  begin: int  # first position
  end: int  # first position after the block
  num_keys: int  # number of keys, from position 0


@functools.cache  # because a search over layouts makes thousands of calls
def attention_blocks(
  length: int, has_prefix: bool = False
) -> tuple[AttentionBlock, ...]:
  """Splits the positions of a sequence into blocks.

  The causal mask hides the keys after a block. In a prefix LM (`has_prefix`), a
  block reads all keys, because the prefix may continue after the block.
  """
  size = _SMALL if length <= _LONG else _LARGE
  return tuple(
    AttentionBlock(begin, end, length if has_prefix else end)
    for begin in range(0, length, size)
    for end in [min(begin + size, length)]
  )


def block_pairs(length: int, has_prefix: bool = False) -> list[int]:
  """Returns how many query-key pairs attention computes in each block."""
  blocks = attention_blocks(length, has_prefix)
  return [(x.end - x.begin) * x.num_keys for x in blocks]


def parameter_shapes(config: PalmConfig) -> dict[str, tuple[int, ...]]:
  """Returns {name of a parameter: shape}, in the order of creation."""
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
  """Returns (name, shape, count) of parameters; layer 0 stands for all layers.

  All layers have equal shapes, so `count` is the number of layers for a
  parameter in layer 0, and 1 for a parameter outside the layers.
  """
  one_layer = dataclasses.replace(config, num_layers=1)
  return [
    (name, shape, 1 if parse_name(name).layer is None else config.num_layers)
    for name, shape in parameter_shapes(one_layer).items()
  ]


def parameter_dims(config: PalmConfig) -> dict[str, tuple[str, ...]]:
  """Returns {name of a parameter: its dimensions}, in the order of creation."""
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
  """Counts parameters as Table 1 of PaLM does, without norm scales."""
  return sum(
    math.prod(shape) * n
    for name, shape, n in distinct_parameters(config)
    if not parse_name(name).is_scale
  )
