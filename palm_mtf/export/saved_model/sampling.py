# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sampling of the next token of each row, by numbers that are tensors.

The rules are those of generation/decode/sampling.py, whose numbers are
constants of a program; the draws are others.
"""

import dataclasses

from palm_mtf._tf import tf2

_GREEDY = 1e-4  # as DecodeConfig.is_greedy


@dataclasses.dataclass(frozen=True)
class Sampler:
  """Draws tokens.

  Attributes:
    temperature: [], float32; 1e-4 or less takes the likeliest token.
    top_k: [], int32: only the k likeliest tokens are drawn.
    top_p: [], float32: only the fewest likeliest tokens with this share are.
    seed: [], int32.
    num_tokens: pieces of the vocabulary.
  """

  temperature: tf2.Tensor
  top_k: tf2.Tensor
  top_p: tf2.Tensor
  seed: tf2.Tensor
  num_tokens: int

  def next_tokens(self, logits: tf2.Tensor, place: tf2.Tensor) -> tf2.Tensor:
    """Samples a token for every row, [rows] int32.

    Args:
      logits: [rows, vocab], float32.
      place: [], int32: number of tokens that rows have drawn before.
    """
    # The embedding may have more rows than the vocabulary has pieces.
    logits = logits[:, : self.num_tokens]
    return tf2.cond(
      self.temperature <= _GREEDY,
      lambda: tf2.argmax(logits, -1, output_type=tf2.int32),
      lambda: self._drawn(logits, place),
    )

  def _drawn(self, logits, place):
    logits, tokens = tf2.math.top_k(
      logits / self.temperature, tf2.minimum(self.top_k, self.num_tokens)
    )
    shares = tf2.nn.softmax(logits)
    before = tf2.cumsum(shares, axis=-1, exclusive=True)
    upto = tf2.cumsum(tf2.where(before < self.top_p, shares, 0.0), axis=-1)
    # One number of each row falls into one of the intervals of the shares.
    number = tf2.random.stateless_uniform(
      [tf2.shape(logits)[0], 1], tf2.stack([self.seed, place])
    )
    at = tf2.searchsorted(upto, number * upto[:, -1:], side="right")
    return tf2.gather(tokens, at[:, 0], batch_dims=1)
