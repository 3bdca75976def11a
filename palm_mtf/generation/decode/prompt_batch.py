# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The sizes of a batch of prompts, on which its programs depend."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class PromptBatch:
  """Sizes of one batch of prompts."""

  num_prompts: int  # divisible by the number of slices of `batch`
  prompt_tokens: int  # length of padded prompts, with the start token
  max_tokens: int  # maximum length of a continuation
  num_tokens: int  # number of pieces in the vocabulary
  # Tokens that end a continuation. After its end, a continuation is filled with
  # the first of these tokens.
  end_ids: tuple[int, ...]
  # Number of tokens before a prompt's text: they are never penalized.
  num_before: int = 1
