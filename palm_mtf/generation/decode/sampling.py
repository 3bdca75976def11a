# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Samples the next token of each row from its logits.

0. A mask forbids tokens that would break a text's grammar.
1. REPETITION_PENALTY applies to tokens that the row already has: it divides a
   logit above 0 and multiplies a logit below 0 (Keskar et al. 2019, CTRL).
2. TEMPERATURE divides all logits; 0 takes the largest logit.
3. TOP_K keeps the k likeliest tokens.
4. TOP_P keeps the likeliest of these k tokens: the fewest whose probabilities
   sum to at least TOP_P times the sum of all k (Holtzman et al. 2020).
"""

from collections.abc import Sequence
from typing import NamedTuple

from palm_mtf._tf import tf
from palm_mtf.config.decode import MOST_GREEDY
from palm_mtf.ops.threefry import threefry
from palm_mtf.ops.xla import fused

_ONE_BITS = 0x3F800000  # the bits of the float32 number 1.0


class SamplingSettings(NamedTuple):
  """Settings of sampling: each is one number for all rows, or a tensor [rows].

  No operations are built for a setting that is a number and keeps all tokens.
  """

  temperature: float | tf.Tensor  # float32; 0 takes the likeliest token
  # int32, at least 1; None, or the vocabulary's size, keeps all tokens.
  top_k: int | tf.Tensor | None
  top_p: float | tf.Tensor  # float32, above 0; 1 keeps all tokens
  repetition_penalty: float = 1.0  # one number for all rows; 1 for no penalty


def _to_column(setting):
  return setting[:, tf.newaxis] if tf.is_tensor(setting) else setting


def _find_least_kept(shares, weights, wanted):
  # Returns the least share (unnormalized probability) to keep, [rows, 1]: the
  # largest t at which the weights of all tokens with share >= t sum to at least
  # `wanted`. A weight is 1 for TOP_K, and the share for TOP_P. Instead of
  # sorting, bisects over the bits of t in 31 passes, because nonnegative floats
  # and their bits have the same order.
  bits = tf.bitcast(shares, tf.int32)

  def halve(i, low, high):
    middle = low + (high - low) // 2
    kept = tf.where_v2(bits >= middle, weights, 0.0)
    enough = tf.reduce_sum(kept, -1, keepdims=True) >= wanted
    low = tf.where_v2(enough, middle, low)
    return i + 1, low, tf.where_v2(enough, high, middle)

  low = tf.zeros_like(wanted, tf.int32)
  high = tf.fill(wanted.shape, _ONE_BITS + 1)
  _, low, _ = tf.while_loop(
    lambda i, low, high: i < 31, halve, [tf.constant(0), low, high]
  )
  return tf.bitcast(low, tf.float32)


def _keep_likely(shares, top_k, top_p):
  # Sets to 0 the shares (unnormalized probabilities) of tokens that TOP_K or
  # TOP_P drops. Tokens that tie with the last kept token are kept too.
  rows, vocab = shares.shape
  if tf.is_tensor(top_k) or (top_k or vocab) < vocab:
    wanted = tf.cast(tf.broadcast_to(_to_column(top_k), [rows, 1]), tf.float32)
    least = _find_least_kept(shares, tf.ones_like(shares), wanted)
    shares = tf.where_v2(shares >= least, shares, 0.0)
  if tf.is_tensor(top_p) or top_p < 1:
    top_p = _to_column(top_p)
    wanted = top_p * tf.reduce_sum(shares, -1, keepdims=True)
    least = _find_least_kept(shares, shares, wanted)
    # TOP_P = 1 keeps all tokens, whatever the rounding errors of the sums.
    shares = tf.where_v2((shares >= least) | (top_p >= 1), shares, 0.0)
  return shares


def is_among(tokens: tf.Tensor, ids: Sequence[int]) -> tf.Tensor:
  """Returns whether each token is one of `ids`, in the shape of `tokens`."""
  return tf.reduce_any(tf.equal(tokens[..., tf.newaxis], list(ids)), -1)


def mask_logits(logits: tf.Tensor, num_tokens: int) -> tf.Tensor:
  """Casts logits [rows, vocab] to float32, and masks ids from `num_tokens` on.

  For these ids the embedding has rows, but the vocabulary has no pieces.
  """
  logits = tf.cast(logits, tf.float32)
  exists = tf.range(logits.shape[-1]) < num_tokens
  return tf.where_v2(exists, logits, logits.dtype.min)


@fused
def forbid_tokens(logits: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
  """Sets logits [rows, vocab] of forbidden tokens to the least float32.

  Bit i % 32 of word i // 32 in `mask`, [rows, words] int32, says whether token
  i is allowed. Tokens beyond the mask are forbidden.
  """
  place = tf.range(32)
  bits = tf.bitwise.right_shift(mask[..., tf.newaxis], place) & 1
  allowed = tf.reshape(bits > 0, [mask.shape[0], -1])
  missing = max(0, logits.shape[1] - allowed.shape[1])
  allowed = tf.pad(allowed, [[0, 0], [0, missing]])[:, : logits.shape[1]]
  logits = tf.cast(logits, tf.float32)
  return tf.where_v2(allowed, logits, logits.dtype.min)


def _penalize(logits, seen, penalty, num_tokens):
  logits = mask_logits(logits, num_tokens)
  if penalty == 1:
    return logits
  less = tf.where_v2(logits > 0, logits / penalty, logits * penalty)
  return tf.where_v2(seen, less, logits)


_fused_penalize = fused(_penalize)


@fused
def _compute_shares(logits, seen, settings, num_tokens):
  # Returns unnormalized probabilities, [rows, vocab]; 0 for dropped tokens.
  logits = _penalize(logits, seen, settings.repetition_penalty, num_tokens)
  logits /= _to_column(settings.temperature)
  shares = tf.exp(logits - tf.reduce_max(logits, -1, keepdims=True))
  return _keep_likely(shares, settings.top_k, settings.top_p)


def _find_likeliest(logits, seen, penalty, num_tokens):
  # Not `fused`, because XLA's argmax takes two to three times as long on a CPU.
  if penalty == 1:
    logits = tf.cast(logits[:, :num_tokens], tf.float32)
  else:
    logits = _fused_penalize(logits, seen, penalty, num_tokens)
  return tf.argmax(logits, -1, output_type=tf.int32)


@fused
def _draw_uniform(key, place):
  # Returns a uniform random number in [0, 1) per row, [rows] float32: a hash of
  # the row's key, [rows, 2], and of `place`, [] or [rows].
  key = tf.cast(key, tf.uint32)
  counter = [
    tf.broadcast_to(tf.cast(each, tf.uint32), key.shape[:1])
    for each in (place, 0)
  ]
  bits, _ = threefry(tf.unstack(key, axis=1), counter)
  # 23 random mantissa bits make a float in [1, 2), from which 1 is subtracted.
  bits = tf.bitwise.right_shift(bits, tf.constant(9, tf.uint32))
  return tf.bitcast(tf.cast(bits, tf.int32) + _ONE_BITS, tf.float32) - 1.0


def _draw(shares, key, place):
  # Inverse transform sampling: a row's uniform number falls into the interval
  # of one token. Not `fused`, because XLA's cumulative sums are slow on a CPU.
  upto = tf.cumsum(shares, axis=-1)
  at = _draw_uniform(key, place)[:, tf.newaxis] * upto[:, -1:]
  # A token with share 0 has an empty interval, so it is never drawn.
  return tf.searchsorted(upto, at, side="right")[:, 0]


def choose_tokens(
  logits: tf.Tensor,
  seen: tf.Tensor,
  key: tf.Tensor,
  place: tf.Tensor,
  settings: SamplingSettings,
  num_tokens: int,
) -> tf.Tensor:
  """Samples a token for every row, [rows] int32.

  Args:
    logits: [rows, vocab], any float dtype.
    seen: [rows, vocab], bool: whether the token occurs in the row. Not read if
      REPETITION_PENALTY is 1.
    key: [rows, 2], int32: hash of (SEED, prompt, sample).
    place: number of tokens already drawn for the row, [] or [rows] int32.
    num_tokens: number of pieces in the vocabulary.
  """
  temperature, penalty = settings.temperature, settings.repetition_penalty
  is_greedy = temperature <= MOST_GREEDY
  # If the temperature is a tensor, some rows may be greedy and others not, so
  # compute the likeliest token and a random token for all rows.
  is_mixed = tf.is_tensor(is_greedy)
  if is_mixed or is_greedy:
    likeliest = _find_likeliest(logits, seen, penalty, num_tokens)
    if not is_mixed:
      return likeliest
    divisor = tf.where_v2(is_greedy, 1.0, temperature)
    settings = settings._replace(temperature=divisor)
  shares = _compute_shares(logits, seen, settings, num_tokens)
  drawn = _draw(shares, key, place)
  return tf.where_v2(is_greedy, likeliest, drawn) if is_mixed else drawn
