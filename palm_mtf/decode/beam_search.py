# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Beam search: the likeliest texts among those that NUM_BEAMS prefixes reach.

  score = log p(tokens) / ((5 + length) / 6) ** LENGTH_PENALTY

(Wu et al. 2016, equation 14), [eod] counted in both. Of all continuations of
the living prefixes by one token the likeliest 2 NUM_BEAMS are looked at: those
that end are compared with the texts that ended before, of the others the best
NUM_BEAMS live on. The search of a prompt is over when no living prefix could
still reach the worst of its ended texts, or at the greatest length, where
living prefixes are texts too.
"""

import dataclasses

from palm_mtf._tf import tf
from palm_mtf.decode.sampling import allowed
from palm_mtf.ops.xla import fused

_NEVER = -1e30


@dataclasses.dataclass(frozen=True)
class BeamSettings:
  """What does not change in a search.

  Attributes:
    num_beams: prefixes of a prompt that live at once.
    length_penalty: exponent of the length, 0 for none.
    max_tokens: most tokens of a text.
    eod_id: ends a text.
    num_tokens: pieces of the vocabulary.
  """

  num_beams: int
  length_penalty: float
  max_tokens: int
  eod_id: int
  num_tokens: int

  def divisor(self, length: tf.Tensor) -> tf.Tensor:
    """Returns what log p of a text of `length` tokens is divided by."""
    length = tf.cast(length, tf.float32)
    return ((5.0 + length) / 6.0) ** self.length_penalty


def first_state(num_prompts: int, settings: BeamSettings) -> list[tf.Tensor]:
  """Returns the state before the first token.

  Returns:
    log p of living prefixes [prompts, beams]; their tokens [prompts, beams,
    max_tokens]; scores of ended texts [prompts, beams]; their tokens; whether
    the search is over [prompts].
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
    state: state that `first_state` or the call before returned.
    logits: [prompts * beams, vocab], of the token at `place`.
    place: [], int32.
    settings: settings of the search.

  Returns:
    The state; the token of each living prefix, [prompts * beams], int32; and
    the row whose prefix it continues, the same shape.
  """
  living, tokens, scores, ended, is_over = state
  prompts, beams = living.shape
  vocab = logits.shape[-1]
  log_p = tf.reshape(
    _log_shares(logits, settings.num_tokens), [prompts, beams, -1]
  )
  log_p = tf.reshape(log_p + living[..., tf.newaxis], [prompts, beams * vocab])
  # As many as could end, and NUM_BEAMS that do not.
  best, index = tf.math.top_k(log_p, min(2 * beams, beams * vocab))
  parent, token = index // vocab, index % vocab
  longer = _put(_pick(tokens, parent), token, place)
  ends = tf.equal(token, settings.eod_id) | tf.equal(
    place + 1, settings.max_tokens
  )
  ends &= best > _NEVER / 2
  divisor = settings.divisor(place + 1)
  scores_then = tf.where_v2(ends, best / divisor, _NEVER)
  scores_then = tf.where_v2(is_over[:, tf.newaxis], _NEVER, scores_then)
  scores, kept = tf.math.top_k(tf.concat([scores, scores_then], 1), beams)
  ended = _pick(tf.concat([ended, longer], 1), kept)
  living, kept = tf.math.top_k(tf.where_v2(ends, _NEVER, best), beams)
  # Log p only falls, and the greatest length has the greatest divisor.
  within_reach = living[:, 0] / settings.divisor(settings.max_tokens)
  is_over |= scores[:, -1] >= within_reach
  first_row = tf.range(prompts)[:, tf.newaxis] * beams
  rows = tf.reshape(_pick(parent, kept) + first_row, [-1])
  token = _pick(token, kept)
  state = [living, _pick(longer, kept), scores, ended, is_over]
  return state, tf.reshape(token, [-1]), rows


def _put(tokens, token, place):
  """Writes token [prompts, n] at `place` of tokens [prompts, n, max_tokens]."""
  at = tf.equal(tf.range(tokens.shape[-1]), place)
  return tf.where_v2(at, token[..., tf.newaxis], tokens)
