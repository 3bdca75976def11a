# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""How prompts are continued: settings of sampling and beam search."""

import dataclasses
from typing import Annotated, Literal

from palm_mtf.config.checked import Checked, Count, real, text, texts, whole
from palm_mtf.errors import UserError

MOST_GREEDY = 1e-4  # up to this TEMPERATURE, decoding is greedy: no division
_MAX_ROWS = 10_000  # samples or beams per prompt; memory holds all


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig(Checked):
  """How the tokens of a continuation are chosen (generation/decode/).

  Attributes:
    temperature: divides the logits; with 0, decoding is greedy.
    top_k: tokens are drawn only from the k likeliest; None for all.
    top_p: tokens are drawn only from the likeliest, up to this total
      probability (nucleus sampling).
    repetition_penalty: with a number above 1, tokens that occur in the prompt
      or the continuation become less likely; 1 is off.
    num_samples: number of continuations of each prompt.
    num_beams: with a number above 1, beam search finds the continuation.
    length_penalty: exponent of beam search's length penalty; values above 0
      favour longer continuations.
    stop_strings: a continuation ends before the first of these strings.
    prompt_lookup: whether steps in C++ draft tokens from earlier places of the
      text, and read several at once where that is faster (native/lookup.h). The
      continuation stays the same.
    weight_dtype: dtype of the weights of matrix products. "activation": as in
      training. "int8": int8, for the inputs of these products too. "int4":
      int4, except that the weights that give the logits are int8. "q4_k",
      "q5_k", "q6_k": the numbers and scales of llama.cpp's types of these
      names, and q6_k for the logits; only in C++, on one CPU device. Norms and
      the lookup of tokens are not quantized (generation/decode/kernels.py).
    knn_index: folder of an index of keys (retrieval/keys.py), whose entries
      make the tokens of similar texts likelier; None for no index.
    knn_neighbours: number of nearest entries that count.
    knn_weight: their share in the probability of a token; 0 is off.
    knn_temperature: divides their squared distances.
    retrieve: number of passages that are put before each prompt, or before the
      last message of a conversation (retrieval/passages.py); 0 for none.
    passages: files of passages.
    passage_template: text with {passages} and {prompt}, which are replaced.
  """

  temperature: Annotated[float, real(0.0, 100.0)] = 0.7
  top_k: Count | None = None
  top_p: Annotated[float, real(0.0, 1.0)] = 1.0
  repetition_penalty: Annotated[float, real(0.01, 100.0)] = 1.0
  num_samples: Annotated[int, whole(maximum=_MAX_ROWS)] = 1
  num_beams: Annotated[int, whole(maximum=_MAX_ROWS)] = 1
  length_penalty: Annotated[float, real(0.0, 10.0)] = 0.6
  stop_strings: Annotated[list[str] | tuple[str, ...], texts("texts")] = ()
  prompt_lookup: bool = True
  weight_dtype: Literal[
    "activation", "int8", "int4", "q4_k", "q5_k", "q6_k"
  ] = "activation"
  knn_index: Annotated[str | None, text("an index's folder")] = None
  knn_neighbours: Count = 1024
  knn_weight: Annotated[float, real(0.0, 1.0)] = 0.25
  knn_temperature: Annotated[float, real(1e-6, 1e12)] = 1.0
  retrieve: Annotated[int, whole(0, 1000)] = 0
  passages: Annotated[list[str] | tuple[str, ...], texts("files")] = ()
  passage_template: str = "{passages}\n\n{prompt}"

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.top_p == 0:
      raise UserError(
        "TOP_P = 0: no token has a share of 0; give a number above 0 and at "
        "most 1, or TEMPERATURE = 0 for the likeliest token."
      )
    # Compiled programs are cached by their settings, which must be hashable.
    object.__setattr__(self, "stop_strings", tuple(self.stop_strings))
    object.__setattr__(self, "passages", tuple(self.passages))
    if self.retrieve and not self.passages:
      raise UserError(
        f"RETRIEVE = {self.retrieve} and PASSAGES = []: give files of passages."
      )
    template = self.passage_template
    if not isinstance(template, str) or not all(
      template.count(x) == 1 for x in ("{passages}", "{prompt}")
    ):
      raise UserError(
        f"PASSAGE_TEMPLATE = {template!r}: give a text with {{passages}} and "
        "{prompt}, once each."
      )
    if self.num_beams > 1:
      for name, off in (
        ("num_samples", 1),
        ("top_k", None),
        ("top_p", 1),
        ("repetition_penalty", 1),
        ("stop_strings", ()),
      ):
        value = getattr(self, name)
        if value != off:
          macro = name.upper()
          raise UserError(
            f"NUM_BEAMS = {self.num_beams} and {macro} = {value!r}: beam "
            "search draws nothing and looks for whole texts; set NUM_BEAMS to "
            f"1 or {macro} to {off}."
          )
    elif self.is_greedy and self.num_samples > 1:
      raise UserError(
        f"NUM_SAMPLES = {self.num_samples} and TEMPERATURE = "
        f"{self.temperature}: all samples would be the same; set TEMPERATURE "
        "above 0 or NUM_SAMPLES to 1."
      )

  @property
  def is_greedy(self) -> bool:
    """Whether decoding always takes the likeliest token."""
    return self.temperature <= MOST_GREEDY

  @property
  def rows_per_prompt(self) -> int:
    """Number of rows that one prompt takes in the decoding batch."""
    return max(self.num_samples, self.num_beams)
