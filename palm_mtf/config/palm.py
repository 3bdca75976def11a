# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The architecture of the model."""

import dataclasses
from typing import Annotated, Literal

from palm_mtf.config.checked import Checked, whole
from palm_mtf.config.macros import values_of
from palm_mtf.errors import UserError

# Layers are limited, because each layer has its own nodes in the graph. Sizes
# are limited to the whole numbers that float32 represents exactly, because
# rotary embedding computes with positions in float32.
MAX_LAYERS, MAX_SIZE = 10_000, 2**24
Size = Annotated[int, whole(maximum=MAX_SIZE)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PalmConfig(Checked):
  """The architecture (section 2 of the PaLM paper; sizes in its Table 1).

  Attributes:
    num_layers: number of Transformer blocks.
    d_model: width of the residual stream.
    num_heads: query heads; num_heads * d_kv may differ from d_model.
    d_kv: width of one head, 256 in PaLM; an even number, because rotary
      embedding rotates pairs of numbers.
    d_ff: hidden width of the MLP, 4 * d_model in PaLM.
    vocab_size: rows of the tied embedding.
    sequence_length: tokens in one sequence.
    norm: "layer_norm" (no bias) or "rms_norm".
    block: "parallel", x + MLP(norm(x)) + Attention(norm(x)), or "serial",
      h + MLP(norm(h)) with h = x + Attention(norm(x)).
    attention: "multi_query" (one key and value head) or "multi_head".
    activation_dtype: "bfloat16", "float32", or "auto", which a command resolves
      to the dtype that the machine multiplies natively
      (machine/activation_dtype.py); master weights, norms, softmax, rotary
      tables and the loss are always float32.
    logits_dtype: "float32": logits are not rounded, as in Google's published
      code. "activation": logits are rounded to the activation dtype.
    final_norm_scale: scale of the last norm, "learned", or "none", as in
      Google's published inference code. The paper does not say which.
    output_fan_in: fan-in with which the kernels o and wo are initialized.
      "separate": each kernel's number of inputs. "joined": the sum of both
      numbers, as in Google's published code, which holds both kernels of a
      parallel block in one matrix.
    remat: activations that the backward pass recomputes to save memory: "none",
      "attention" (only attention weights) or "layer" (all activations of a
      layer). The result has the same bits in all three cases.
    objective: what training predicts: "causal", each token from the tokens
      before it; "prefix_lm", the rest of a text from its start; or
      "span_corruption", removed spans from the remaining text. With the last
      two, inputs attend to one another in both directions
      (data/batches/objectives.py).
  """

  num_layers: Annotated[int, whole(maximum=MAX_LAYERS)]
  d_model: Size
  num_heads: Size
  d_kv: Size
  d_ff: Size
  vocab_size: Size
  sequence_length: Size
  norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
  block: Literal["parallel", "serial"] = "parallel"
  attention: Literal["multi_query", "multi_head"] = "multi_query"
  activation_dtype: Literal["auto", "bfloat16", "float32"] = "bfloat16"
  logits_dtype: Literal["float32", "activation"] = "float32"
  final_norm_scale: Literal["learned", "none"] = "learned"
  output_fan_in: Literal["separate", "joined"] = "separate"
  remat: Literal["none", "attention", "layer"] = "none"
  objective: Literal["causal", "prefix_lm", "span_corruption"] = "causal"

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.d_kv % 2:
      raise UserError(
        f"D_KV = {self.d_kv}: rotary embedding turns pairs of numbers, so "
        f"D_KV is even; use {self.d_kv + 1}."
      )
    if self.output_fan_in == "joined" and self.block == "serial":
      raise UserError(
        'OUTPUT_FAN_IN = "joined": a serial block never adds the products of '
        'o and wo; use "separate".'
      )

  @property
  def has_prefix(self) -> bool:
    """Whether inputs of a sequence attend to one another in both directions."""
    return self.objective != "causal"

  def macros(self) -> dict[str, object]:
    """Returns {macro: value} of all settings except ACTIVATION_DTYPE.

    ACTIVATION_DTYPE is omitted, because a checkpoint fits either dtype.
    """
    macros = values_of(self)
    del macros["ACTIVATION_DTYPE"]
    return macros
