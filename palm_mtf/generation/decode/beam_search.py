# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Beam search: the likeliest texts among those that NUM_BEAMS prefixes reach.

  score = log p(tokens) / ((5 + length) / 6) ** LENGTH_PENALTY

(Wu et al. 2016, equation 14), [eod] counted in both.
"""

import dataclasses

from palm_mtf._tf import tf
from palm_mtf.generation.decode.sampling import allowed
from palm_mtf.ops.xla import fused

# Each search has NUM_BEAMS living prefixes and the best NUM_BEAMS ended texts.
_NEVER = -1e30  # log p of neither: less than any text has


@dataclasses.dataclass(frozen=True)
class BeamSettings:
  """Constants of a search."""

  num_beams: int  # prefixes of a prompt that live at once
  length_penalty: float  # exponent of the length, 0 for none
  max_tokens: int  # of a text
  eod_id: int  # token that ends a text
  num_tokens: int  # pieces of the vocabulary

  def divisor(self, length: tf.Tensor) -> tf.Tensor:
    """Returns the length penalty of a text, the divisor of its log p."""
    length = tf.cast(length, tf.float32)
    return ((5.0 + length) / 6.0) ** self.length_penalty


def first_state(num_prompts: int, settings: BeamSettings) -> list[tf.Tensor]:
  """Returns the state before the first token.

  Returns:
    log p of living prefixes, [prompts, beams] float32; their tokens, [prompts,
    beams, max_tokens] int32; scores of ended texts and their tokens, shaped
    alike; whether each search is over, [prompts] bool.
  """
  shape = [num_prompts, settings.num_beams]
  # All beams are the same prompt: one of them lives.
  living = tf.where_v2(tf.equal(tf.range(shape[1]), 0), 0.0, _NEVER)
  tokens = tf.fill([*shape, settings.max_tokens], settings.eod_id)
  return [
    tf.broadcast_to(living, shape),
    tokens,
    tf.fill(shape, _NEVER),
    tokens,
    tf.fill(shape[:1], False),
  ]


@fused
def _log_shares(logits, num_tokens):
  return tf.nn.log_softmax(allowed(logits, num_tokens))


def _pick(x, index):
  return tf.gather(x, index, batch_dims=1)


def advance(
  state: list[tf.Tensor],
  logits: tf.Tensor,
  place: tf.Tensor,
  settings: BeamSettings,
) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
  """Adds one token to every living prefix.

  Args:
    state: result of `first_state` or of the call before.
    logits: [prompts * beams, vocab], of the token at `place`.
    place: number of the token, [] int32.
    settings: constants of the search.

  Returns:
    The state; the token of each living prefix, [prompts * beams] int32; and
    the row of the prefix that it continues, [prompts * beams] int32.
  """
  living, tokens, scores, ended, is_over = state
  prompts, beams = living.shape
  vocab = logits.shape[-1]
  log_p = tf.reshape(
    _log_shares(logits, settings.num_tokens), [prompts, beams, -1]
  )
  log_p = tf.reshape(log_p + living[..., tf.newaxis], [prompts, beams * vocab])
  # The likeliest 2 NUM_BEAMS of all continuations: if NUM_BEAMS of them end,
  # as many still live on.
  best, index = tf.math.top_k(log_p, min(2 * beams, beams * vocab))
  parent, token = index // vocab, index % vocab
  longer = _put(_pick(tokens, parent), token, place)
  ends = tf.equal(token, settings.eod_id) | tf.equal(
    place + 1, settings.max_tokens
  )
  ends &= best > _NEVER / 2
  divisor = settings.divisor(place + 1)
  scores_then = tf.where_v2(ends, best / divisor, _NEVER)
  # Those that end compete with the texts that ended before.
  scores_then = tf.where_v2(is_over[:, tf.newaxis], _NEVER, scores_then)
  scores, kept = tf.math.top_k(tf.concat([scores, scores_then], 1), beams)
  ended = _pick(tf.concat([ended, longer], 1), kept)
  living, kept = tf.math.top_k(tf.where_v2(ends, _NEVER, best), beams)
  # A search is over when no living prefix could still reach the worst ended
  # text: log p only falls, and the greatest length has the greatest divisor.
  within_reach = living[:, 0] / settings.divisor(settings.max_tokens)
  is_over |= scores[:, -1] >= within_reach
  first_row = tf.range(prompts)[:, tf.newaxis] * beams
  rows = tf.reshape(_pick(parent, kept) + first_row, [-1])
  token = _pick(token, kept)
  state = [living, _pick(longer, kept), scores, ended, is_over]
  return state, tf.reshape(token, [-1]), rows


def _put(tokens, token, place):
  # token [prompts, n], tokens [prompts, n, max_tokens]
  at = tf.equal(tf.range(tokens.shape[-1]), place)
  return tf.where_v2(at, token[..., tf.newaxis], tokens)
