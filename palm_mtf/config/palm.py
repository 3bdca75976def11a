# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The architecture of the model."""

import dataclasses

from palm_mtf.errors import UserError, check_choice, check_count

# The largest sizes: layers are limited because the graph has every layer, and
# positions because rotary embedding counts them in float32, which represents
# every whole number up to 2**24.
MAX_SIZES = {
  "num_layers": 10_000,
  "d_model": 2**24,
  "num_heads": 2**24,
  "d_kv": 2**24,
  "d_ff": 2**24,
  "vocab_size": 2**24,
  "sequence_length": 2**24,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PalmConfig:
  """The architecture (PaLM 2; sizes in Table 1).

  Attributes:
    num_layers: blocks.
    d_model: width of the residual stream.
    num_heads: query heads; PaLM 540B has num_heads * d_kv != d_model.
    d_kv: width of one head, 256 in PaLM; even, because rotary turns pairs.
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
    logits_dtype: "float32", the product that gives the logits is not rounded,
      as in Google's published code; or "activation", it is rounded like other
      products.
    final_norm_scale: scale of the last norm, "learned", or "none", as in
      Google's published inference code. PaLM does not say.
    output_fan_in: fan-in with which the kernels o and wo are initialized: the
      number of each kernel's inputs, "separate", or of both kernels' inputs,
      "joined", as in Google's published code, where a parallel block has both
      in one matrix.
    remat: activations that a step recomputes instead of keeping, which takes
      time: "none", "attention" or the whole "layer"; no bit of the result
      depends on it.
    objective: training objective: "causal", each token from the tokens before
      it; or targets from inputs that attend to one another in both directions:
      "prefix_lm", the rest of a text from its start, or "span_corruption", the
      spans that a text lacks (data/batches/objectives.py).
  """

  num_layers: int
  d_model: int
  num_heads: int
  d_kv: int
  d_ff: int
  vocab_size: int
  sequence_length: int
  norm: str = "layer_norm"
  block: str = "parallel"
  attention: str = "multi_query"
  activation_dtype: str = "bfloat16"
  logits_dtype: str = "float32"
  final_norm_scale: str = "learned"
  output_fan_in: str = "separate"
  remat: str = "none"
  objective: str = "causal"

  def __post_init__(self) -> None:
    for name, most in MAX_SIZES.items():
      check_count(name.upper(), getattr(self, name), maximum=most)
    # Check here, so that the message names the macro and not a shape.
    if self.d_kv % 2:
      raise UserError(
        f"D_KV = {self.d_kv}: rotary embedding turns pairs of numbers, so "
        f"D_KV is even; use {self.d_kv + 1}."
      )
    # model/layers.py and model/palm.py look up these names.
    check_choice("NORM", self.norm, ["layer_norm", "rms_norm"])
    check_choice("BLOCK", self.block, ["parallel", "serial"])
    check_choice("ATTENTION", self.attention, ["multi_query", "multi_head"])
    check_choice(
      "ACTIVATION_DTYPE",
      self.activation_dtype,
      ["auto", "bfloat16", "float32"],
    )
    check_choice("LOGITS_DTYPE", self.logits_dtype, ["float32", "activation"])
    check_choice("FINAL_NORM_SCALE", self.final_norm_scale, ["learned", "none"])
    check_choice("OUTPUT_FAN_IN", self.output_fan_in, ["separate", "joined"])
    if self.output_fan_in == "joined" and self.block == "serial":
      raise UserError(
        'OUTPUT_FAN_IN = "joined": a serial block never adds the products of '
        'o and wo; use "separate".'
      )
    check_choice("REMAT", self.remat, ["none", "attention", "layer"])
    check_choice(
      "OBJECTIVE", self.objective, ["causal", "prefix_lm", "span_corruption"]
    )

  @property
  def has_prefix(self) -> bool:
    """Whether inputs attend to one another in both directions."""
    return self.objective != "causal"

  def macros(self) -> dict[str, object]:
    """Returns every setting except the dtype, which runs choose, by macro."""
    fields = dataclasses.asdict(self)
    del fields["activation_dtype"]
    return {name.upper(): value for name, value in fields.items()}
