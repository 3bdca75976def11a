# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Beam search: keeps NUM_BEAMS prefixes to find the text with the best score.

  score = log p(tokens) / ((5 + length) / 6) ** LENGTH_PENALTY

(Wu et al. 2016, equation 14). [eod] counts in both log p and length.
"""

import dataclasses
from collections.abc import Sequence

from palm_mtf._tf import tf
from palm_mtf.generation.decode.sampling import mask_logits
from palm_mtf.ops.xla import fused

# Stands for the log p of a prefix, or the score of a text, that does not exist
# yet: it is less than every real log p or score.
_NEVER = -1e30


@fused
def _compute_log_probabilities(logits, num_tokens):
  return tf.nn.log_softmax(mask_logits(logits, num_tokens))


def _pick(x, index):
  return tf.gather(x, index, batch_dims=1)


def _put_token(tokens, token, place):
  # Writes token [prompts, n] into tokens [prompts, n, max_tokens].
  at = tf.equal(tf.range(tokens.shape[-1]), place)
  return tf.where_v2(at, token[..., tf.newaxis], tokens)


@dataclasses.dataclass(frozen=True)
class BeamSearch:
  """Beam search with these constants; each prompt has a separate search.

  A living prefix is a continuation that has not ended. The state of the
  searches is a list of:
    whether each search is over, [prompts] bool;
    log p of living prefixes, [prompts, beams] float32;
    tokens of living prefixes, [prompts, beams, max_tokens] int32;
    scores of ended texts, [prompts, beams] float32;
    tokens of ended texts, [prompts, beams, max_tokens] int32.
  """

  num_beams: int  # number of living prefixes per prompt
  length_penalty: float  # LENGTH_PENALTY; 0 for no penalty
  max_tokens: int  # maximum length of a text
  eod_id: int  # token that ends a text
  num_tokens: int  # number of pieces in the vocabulary

  def first_state(self, num_prompts: int) -> list[tf.Tensor]:
    """Returns the state before the first token."""
    shape = [num_prompts, self.num_beams]
    # At first all beams of a prompt are equal, so only the first beam lives.
    living = tf.where_v2(tf.equal(tf.range(shape[1]), 0), 0.0, _NEVER)
    tokens = tf.fill([*shape, self.max_tokens], self.eod_id)
    return [
      tf.fill(shape[:1], False),
      tf.broadcast_to(living, shape),
      tokens,
      tf.fill(shape, _NEVER),
      tokens,
    ]

  def advance(
    self, state: Sequence[tf.Tensor], logits: tf.Tensor, place: tf.Tensor
  ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
    """Adds one token to every living prefix.

    Args:
      logits: [prompts * beams, vocab], for the new token.
      place: index of the new token in its text, [] int32.

    Returns:
      The state after this token; the new token of each living prefix, [prompts
      * beams] int32; and, for each living prefix, the index of the row of
      `logits` from which the new token was chosen, [prompts * beams] int32.
    """
    is_over, living, tokens, scores, ended = state
    prompts, beams = living.shape
    vocab = logits.shape[-1]
    log_p = tf.reshape(
      _compute_log_probabilities(logits, self.num_tokens), [prompts, beams, -1]
    )
    log_p = tf.reshape(
      log_p + living[..., tf.newaxis], [prompts, beams * vocab]
    )
    # Take the 2 * NUM_BEAMS likeliest continuations. At least NUM_BEAMS of
    # these live, because at most one continuation per prefix ends with [eod].
    best, index = tf.math.top_k(log_p, min(2 * beams, beams * vocab))
    parent, token = index // vocab, index % vocab
    longer = _put_token(_pick(tokens, parent), token, place)
    ends = tf.equal(token, self.eod_id) | tf.equal(place + 1, self.max_tokens)
    ends &= best > _NEVER / 2
    # Continuations that end now compete with texts that ended earlier.
    new_scores = tf.where_v2(
      ends, best / self._compute_divisor(place + 1), _NEVER
    )
    new_scores = tf.where_v2(is_over[:, tf.newaxis], _NEVER, new_scores)
    scores, kept = tf.math.top_k(tf.concat([scores, new_scores], 1), beams)
    ended = _pick(tf.concat([ended, longer], 1), kept)
    living, kept = tf.math.top_k(tf.where_v2(ends, _NEVER, best), beams)
    # A search is over when no living prefix can reach the score of the worst
    # ended text. Log p is negative and only falls, so a prefix scores at most
    # its present log p divided by the largest divisor, that of `max_tokens`.
    within_reach = living[:, 0] / self._compute_divisor(self.max_tokens)
    is_over |= scores[:, -1] >= within_reach
    first_row = tf.range(prompts)[:, tf.newaxis] * beams
    rows = tf.reshape(_pick(parent, kept) + first_row, [-1])
    state = [is_over, living, _pick(longer, kept), scores, ended]
    return state, tf.reshape(_pick(token, kept), [-1]), rows

  def _compute_divisor(self, length):
    length = tf.cast(length, tf.float32)
    return ((5.0 + length) / 6.0) ** self.length_penalty
