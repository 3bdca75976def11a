# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Continues texts: token by token at TEMPERATURE, until [eod] or long enough.

Each token comes from a full forward pass over the text so far. The draws are
keyed by (seed, prompt), so that a continuation does not depend on the other
texts of its batch.
"""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from palm_mtf.config import RunConfig
from palm_mtf.data.vocabulary import Vocabulary
from palm_mtf.errors import UserError

if TYPE_CHECKING:  # imports TensorFlow, which checking prompts does not need
  from palm_mtf.loaded_model import LoadedModel

TEMPERATURE = 0.7


def check_prompts(
  run: RunConfig, vocabulary: Vocabulary, sequence_length: int
) -> None:
  """Raises UserError unless each prompt leaves room for its continuation."""
  for prompt in run.prompts:
    num_tokens = len(vocabulary.encode(prompt))
    if num_tokens + run.sample_tokens > sequence_length:
      raise UserError(
        f"PROMPTS: {prompt[:40]!r} is {num_tokens:,} tokens and SAMPLE_TOKENS "
        f"= {run.sample_tokens:,}, together more than SEQUENCE_LENGTH = "
        f"{sequence_length:,}: shorten one of them."
      )


def continue_texts(
  loaded: "LoadedModel",
  vocabulary: Vocabulary,
  prompts: Sequence[str],
  *,
  sample_tokens: int,
  seed: int,
) -> list[str]:
  """Returns what the model adds to each of `prompts`.

  Args:
    loaded: the model, for a batch of at least as many rows as prompts.
    vocabulary: of the model.
    prompts: texts that passed `check_prompts`.
    sample_tokens: the longest continuation, in tokens.
    seed: of the draws.
  """
  texts = [vocabulary.encode(prompt) for prompt in prompts]
  starts = [len(text) for text in texts]
  ends = [start + sample_tokens for start in starts]
  draws = [_generator(seed, prompt) for prompt in prompts]
  # As in training, inputs are the tokens moved right by one: token p - 1 is at
  # place p, and the logits at place p are of token p.
  inputs = np.zeros([loaded.batch_size, loaded.sequence_length + 1], np.int32)
  for row, text in enumerate(texts):
    inputs[row, 1 : len(text) + 1] = text
  position = min(starts)
  while position < max(ends):
    logits = loaded.next_logits(inputs[:, :-1], position)
    for row, text in enumerate(texts):
      if len(text) != position or position >= ends[row]:
        continue  # still inside its prompt, or finished
      token = _draw(logits[row, : vocabulary.size], draws[row])
      if token == vocabulary.eod_id:
        ends[row] = position
        continue
      text.append(token)
      inputs[row, position + 1] = token
    position += 1
  return [
    vocabulary.decode(text[start:])
    for text, start in zip(texts, starts, strict=True)
  ]


def _generator(seed: int, prompt: str) -> np.random.Generator:
  digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
  return np.random.default_rng([seed, int.from_bytes(digest, "little")])


def _draw(logits: np.ndarray, draws: np.random.Generator) -> int:
  """Draws a token from softmax(logits / TEMPERATURE), [vocab] float32."""
  scaled = logits.astype(np.float64) / TEMPERATURE
  shares = np.exp(scaled - scaled.max())
  return int(draws.choice(len(shares), p=shares / shares.sum()))
