# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of parameters, the schema of checkpoints: made and read here alone.

embedding               the tied table, [vocab, d_model]
layer_007/attention/q   a part of a layer; its norms end in "/scale"
final_norm/scale        the last norm

The last word says what a parameter is. Mesh TensorFlow's layers have the same
words: "encoder/block_000/layer_000/SelfAttention/q", "shared/embedding".
"""

import re
from typing import NamedTuple

# Three digits at least: names sort by layer up to layer 999.
_IN_LAYER = re.compile(r"layer_(\d{3,})/(.+)")


class ParameterName(NamedTuple):
  """What a name says.

  Attributes:
    layer: number of the layer, from 0; None outside of all.
    part: name within the layer, "attention/q"; the whole name outside.
  """

  layer: int | None
  part: str

  @property
  def kind(self) -> str:
    """PaLM's are "embedding", "norm", "attention" and "mlp"."""
    first = self.part.partition("/")[0]  # "mlp_norm" and "final_norm" too
    return "norm" if first.endswith("norm") else first

  @property
  def last(self) -> str:
    """The last word: "q" of "attention/q"."""
    return self.part.rpartition("/")[2]

  @property
  def is_kernel(self) -> bool:
    """Whether it is a matrix of a product: no embedding, scale or bias."""
    return not self.is_scale and not self.last.endswith(("embedding", "bias"))

  @property
  def is_scale(self) -> bool:
    """Whether it is the scale of a norm."""
    return self.last == "scale"


def layer_name(layer: int) -> str:
  """Returns what the names of a layer's parameters begin with."""
  return f"layer_{layer:03d}"


def parsed(name: str) -> ParameterName:
  """Returns what the name of a parameter says."""
  match = _IN_LAYER.fullmatch(name)
  if match:
    return ParameterName(int(match[1]), match[2])
  return ParameterName(None, name)
