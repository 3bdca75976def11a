# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The architecture."""

import dataclasses

from palm_mtf.errors import UserError, check_choice, check_count

# Largest sizes. Every layer is built into the graph. Rotary embedding counts
# positions in float32, which has every whole number up to 2**24.
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
      by what the machine multiplies natively (machine/activation_dtype.py);
      masters, norms, softmax, rotary tables and the loss are float32 always.
    logits_dtype: "float32", the product behind the last norm is not rounded, as
      in Google's published code; or "activation", it is rounded as all others.
    final_norm_scale: scale of the last norm, "learned", or "none", as in
      Google's published inference code. PaLM does not say.
    output_fan_in: fan-in of the kernels o and wo when they are drawn: their own
      inputs, "separate", or those of both, "joined", as if they were one matrix
      of a parallel block, which they are in Google's published code.
    remat: activations that a step recomputes instead of keeping, which takes
      time: "none", "attention" or the whole "layer"; no bit of the result
      depends on it.
    objective: training objective: "causal", each token from those before it; or
      targets from inputs that attend to one another in both directions:
      "prefix_lm", the rest of a text from its beginning, "span_corruption", the
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

  def __post_init__(self):
    for name, most in MAX_SIZES.items():
      check_count(name.upper(), getattr(self, name), maximum=most)
    # Named by its macro here, not by a product's shape later.
    if self.d_kv % 2:
      raise UserError(
        f"D_KV = {self.d_kv}: rotary embedding turns pairs of numbers, so "
        f"D_KV is even; use {self.d_kv + 1}."
      )
    # Names that model/layers.py and model/palm.py look up.
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
    """Returns every setting but the dtype, which is the run's, by its macro."""
    fields = dataclasses.asdict(self)
    del fields["activation_dtype"]
    return {name.upper(): value for name, value in fields.items()}
