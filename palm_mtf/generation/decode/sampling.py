# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sampling of the next token of each row, from its logits.

1. REPETITION_PENALTY: a logit above 0 of a token that the row has already is
   divided by it, one below 0 multiplied (Keskar et al. 2019, CTRL).
2. TEMPERATURE divides all logits; at 0 the largest one is taken.
3. TOP_K keeps the k likeliest tokens.
4. TOP_P keeps the fewest likeliest tokens that together have this share of
   the probability left (Holtzman et al. 2020).
"""

from typing import NamedTuple

from palm_mtf._tf import tf
from palm_mtf.config.decode import MOST_GREEDY, DecodeConfig
from palm_mtf.ops.threefry import threefry
from palm_mtf.ops.xla import fused

_ONE_BITS = 0x3F800000  # of float32 1.0


def _least_kept(shares, weights, wanted):
  # The largest t [rows, 1] for which weights of shares >= t sum to `wanted`.
  # Nothing is sorted: bisection over the bits of a float32 takes 31 passes over
  # the vocabulary. Floats that are not negative are ordered as their bits are.
  bits = tf.bitcast(shares, tf.int32)

  def halve(_, low, high):
    middle = low + (high - low) // 2
    total = tf.reduce_sum(
      tf.where_v2(bits >= middle, weights, 0.0), -1, keepdims=True
    )
    enough = total >= wanted
    return (
      tf.where_v2(enough, middle, low),
      tf.where_v2(enough, high, middle),
    )

  low = tf.zeros_like(wanted, tf.int32)
  high = tf.fill(wanted.shape, _ONE_BITS + 1)
  _, low, _ = tf.while_loop(
    lambda i, low, high: i < 31,
    lambda i, low, high: (i + 1, *halve(i, low, high)),
    [tf.constant(0), low, high],
  )
  return tf.bitcast(low, tf.float32)


def _likely_enough(shares, top_k, top_p):
  # Tokens that tie with the last one kept are kept.
  if top_k and top_k < shares.shape[-1]:
    ones = tf.ones_like(shares)
    wanted = tf.fill([shares.shape[0], 1], float(top_k))
    least = _least_kept(shares, ones, wanted)
    shares = tf.where_v2(shares >= least, shares, 0.0)
  if top_p < 1:
    wanted = top_p * tf.reduce_sum(shares, -1, keepdims=True)
    least = _least_kept(shares, shares, wanted)
    shares = tf.where_v2(shares >= least, shares, 0.0)
  return shares


def _penalized(logits, seen, config, num_tokens):
  logits = allowed(logits, num_tokens)
  penalty = config.repetition_penalty
  if penalty == 1:
    return logits
  less = tf.where_v2(logits > 0, logits / penalty, logits * penalty)
  return tf.where_v2(seen, less, logits)


def allowed(logits: tf.Tensor, num_tokens: int) -> tf.Tensor:
  """Returns logits [rows, vocab] in float32, masked from `num_tokens` on."""
  # The embedding may have more rows than the vocabulary has pieces.
  logits = tf.cast(logits, tf.float32)
  exists = tf.range(logits.shape[-1]) < num_tokens
  return tf.where_v2(exists, logits, logits.dtype.min)


_candidates = fused(_penalized)


@fused
def _shares(logits, seen, config, num_tokens):
  logits = _penalized(logits, seen, config, num_tokens)
  logits /= config.temperature
  shares = tf.exp(logits - tf.reduce_max(logits, -1, keepdims=True))
  return _likely_enough(shares, config.top_k, config.top_p)


def _likeliest(logits, seen, config, num_tokens):
  # Outside of XLA, whose argmax on a CPU takes two to three times as long.
  if config.repetition_penalty == 1:
    logits = tf.cast(logits[:, :num_tokens], tf.float32)
  else:
    logits = _candidates(logits, seen, config, num_tokens)
  return tf.argmax(logits, -1, output_type=tf.int32)


@fused
def _uniform(key, place):
  # A number in [0, 1) for each key, [rows] float32: a hash of key and place,
  # of which all rows have one, [], or each its own, [rows].
  key = tf.cast(key, tf.uint32)
  counter = [
    tf.broadcast_to(tf.cast(each, tf.uint32), key.shape[:1])
    for each in (place, 0)
  ]
  bits, _ = threefry(tf.unstack(key, axis=1), counter)
  # 23 bits behind a leading 1: in [1, 2), and 1 - 2 ** -23 at most is left.
  bits = tf.bitwise.right_shift(bits, tf.constant(9, tf.uint32))
  return tf.bitcast(tf.cast(bits, tf.int32) + _ONE_BITS, tf.float32) - 1.0


def next_tokens(
  logits: tf.Tensor,
  seen: tf.Tensor,
  key: tf.Tensor,
  place: tf.Tensor,
  config: DecodeConfig,
  num_tokens: int,
) -> tf.Tensor:
  """Samples a token for every row, [rows] int32.

  Args:
    logits: [rows, vocab], any float dtype.
    seen: [rows, vocab], bool: tokens that the row has; any tensor where
      REPETITION_PENALTY is 1.
    key: [rows, 2], int32: hash of (SEED, prompt, sample).
    place: number of tokens that the row has drawn before, [] int32.
    config: settings of sampling.
    num_tokens: pieces of the vocabulary.
  """
  if config.is_greedy:
    return _likeliest(logits, seen, config, num_tokens)
  return _drawn(_shares(logits, seen, config, num_tokens), key, place)


def _drawn(shares, key, place):
  # By inversion: one uniform number of the row's own falls into one of the
  # intervals that the shares make. No row's text depends on another row.
  # Outside of XLA, whose cumulative sums on a CPU are slow.
  upto = tf.cumsum(shares, axis=-1)
  at = _uniform(key, place)[:, tf.newaxis] * upto[:, -1:]
  # A token without a share has no interval that a number could fall into.
  return tf.searchsorted(upto, at, side="right")[:, 0]


class RowSettings(NamedTuple):
  """Settings of sampling of each row, without a repetition penalty.

  Attributes:
    temperature: [rows], float32; 0 takes the likeliest token.
    top_k: [rows], int32, from 1; the size of the vocabulary keeps all.
    top_p: [rows], float32, above 0; 1 keeps all.
  """

  temperature: tf.Tensor
  top_k: tf.Tensor
  top_p: tf.Tensor


@fused
def _shares_of_rows(logits, temperature, num_tokens):
  logits = allowed(logits, num_tokens) / temperature[:, tf.newaxis]
  return tf.exp(logits - tf.reduce_max(logits, -1, keepdims=True))


@fused
def _limited(shares, top_k, top_p):
  # As `_likely_enough`; a row that keeps all keeps its bits.
  top_k, top_p = top_k[:, tf.newaxis], top_p[:, tf.newaxis]
  least = _least_kept(shares, tf.ones_like(shares), tf.cast(top_k, tf.float32))
  shares = tf.where_v2(shares >= least, shares, 0.0)
  wanted = top_p * tf.reduce_sum(shares, -1, keepdims=True)
  least = _least_kept(shares, shares, wanted)
  return tf.where_v2((shares >= least) | (top_p >= 1), shares, 0.0)


def next_tokens_of_rows(
  logits: tf.Tensor,
  key: tf.Tensor,
  place: tf.Tensor,
  settings: RowSettings,
  num_tokens: int,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
  """Samples a token for every row by settings of its own.

  Args:
    logits: [rows, vocab], any float dtype.
    key: [rows, 2], int32: hash of (SEED, prompt, sample).
    place: number of tokens that each row has drawn before, [rows] int32.
    settings: settings of each row.
    num_tokens: pieces of the vocabulary.

  Returns:
    The same tokens three times, [rows] int32, each at a higher price: right
    where all rows are greedy; where none has TOP_K or TOP_P; always.
  """
  likeliest = _likeliest(logits, tf.constant(False), DecodeConfig(), num_tokens)
  is_greedy = settings.temperature <= MOST_GREEDY
  temperature = tf.where_v2(is_greedy, 1.0, settings.temperature)
  shares = _shares_of_rows(logits, temperature, num_tokens)
  some = _limited(shares, settings.top_k, settings.top_p)
  drawn, limited = (
    tf.where_v2(is_greedy, likeliest, _drawn(x, key, place))
    for x in (shares, some)
  )
  return likeliest, drawn, limited
