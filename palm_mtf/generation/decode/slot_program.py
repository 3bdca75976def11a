# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Graph that continues texts which begin and end at different times.

Each text has a slot, a row of a cache that is kept in variables: one program
prefills a slot while the others wait, another gives all slots more tokens.
Where a layout splits `batch` over n devices, slot i is row i // n of the
cache's slice on device i % n; the first slots are then the first rows of every
slice, and a step may leave out the others.
"""

import dataclasses
from typing import NamedTuple

from palm_mtf._tf import tf
from palm_mtf.generation.decode.batch_sharding import join_rows, split_rows
from palm_mtf.generation.decode.forward import prefill
from palm_mtf.generation.decode.generate_program import DecodeModel, assign_all
from palm_mtf.generation.decode.native_decoder import make_decoder
from palm_mtf.generation.decode.sampling import (
  RowSettings,
  allowed,
  next_tokens_of_rows,
)
from palm_mtf.generation.decode.score_program import NUM_LIKELIEST
from palm_mtf.generation.decode.strategies import aligned_length, repeat
from palm_mtf.generation.decode.weights import LaidOut
from palm_mtf.native.decoding import Texts


@dataclasses.dataclass(frozen=True)
class InsertProgram:
  """Prefills slots, at most one on each device that has rows of its own.

  Attributes:
    prompts: feed [slices, prompt_tokens], int32, each from the left.
    lengths: feed [slices], int32: tokens of each prompt.
    rows: feed [slices], int32: row of each slice that becomes the prompt's; -1
      leaves the slice as it is.
    insert: prefills.
  """

  prompts: tf.Tensor
  lengths: tf.Tensor
  rows: tf.Tensor
  insert: tf.Operation


@dataclasses.dataclass(frozen=True)
class StepProgram:
  """Reads the last token of each of the first slots and chooses the next ones.

  Attributes:
    count: feed [], int32: number of tokens to choose; one is chosen where
      weights are not packed, or log p is wanted.
    texts: feed [rows, 6], int32, of each text: last token and its position,
      from 0; tokens drawn before; key of the draws, two numbers; TOP_K.
    shares: feed [rows, 2], float32, of each text: TEMPERATURE and TOP_P.
    choices: next tokens, [rows, count] int32, at the three prices of
      `next_tokens_of_rows`: fetch one.
    log_probs: what to fetch with each of `choices` where log p is wanted.
    update: keeps the cache; to be run with every fetch.
  """

  count: tf.Tensor
  texts: tf.Tensor
  shares: tf.Tensor
  choices: tuple[tf.Tensor, ...]
  log_probs: tuple["LogProbs", ...]
  update: tf.Operation


class LogProbs(NamedTuple):
  """What tells how likely tokens are, as `score` does.

  Attributes:
    of_chosen: log p of the chosen tokens, [rows] float32.
    likeliest: the likeliest tokens, [rows, NUM_LIKELIEST] int32.
    of_likeliest: log p of the likeliest, [rows, NUM_LIKELIEST] float32.
  """

  of_chosen: tf.Tensor
  likeliest: tf.Tensor
  of_likeliest: tf.Tensor


class SlotPrograms:
  """Builds programs over one cache in the current tf.Graph.

  Attributes:
    initialize: makes the cache; to be run before every program.
  """

  def __init__(self, model: DecodeModel, num_slots: int, num_slices: int):
    """Makes the variables of the cache.

    Args:
      model: result of `build_decode_model`.
      num_slots: number of texts at once, divisible by `num_slices`.
      num_slices: parts that the layout splits `batch` into.
    """
    self._model, self._impl = model, model.placement
    self._num_slices = num_slices
    self._memory_length = aligned_length(model.config.sequence_length)
    self._decoder = make_decoder(model.weights)
    # A prefill of one token fills all rows: zeros would be one constant, in the
    # memory of which all of the cache would be written.
    prompts = tf.zeros([num_slices, 1], tf.int32)
    lengths = split_rows(self._impl, tf.ones([num_slices], tf.int32))
    cache = self._prefill(prompts, lengths)
    self._cache = [
      self._impl.slicewise(
        lambda x: tf.Variable(
          repeat(x, num_slots // num_slices),
          trainable=False,
          use_resource=True,
          name="slots",
        ),
        x,
      )
      for x in cache
    ]
    self.initialize = tf.group(
      [x.initializer for each in self._cache for x in each.tensor_list]
    )

  def insert(self, prompt_tokens: int) -> InsertProgram:
    """Builds prefill of prompts of at most `prompt_tokens` tokens."""
    shape = [self._num_slices, prompt_tokens]
    prompts = tf.placeholder(tf.int32, shape, "prompts")
    lengths, rows = (
      tf.placeholder(tf.int32, shape[:1], name) for name in ("lengths", "rows")
    )
    new = self._prefill(prompts, split_rows(self._impl, lengths))
    at = split_rows(self._impl, rows)
    after = [
      self._impl.slicewise(_replaced, x, y, at)
      for x, y in zip(self._read(), new, strict=True)
    ]
    return InsertProgram(prompts, lengths, rows, assign_all(self._cache, after))

  def step(
    self, num_rows: int, num_tokens: int, *, wants_log_probs: bool
  ) -> StepProgram:
    """Builds steps of the first slots.

    Args:
      num_rows: number of slots, divisible by `num_slices`. Row i is that of
        slot `i % n * num_slices + i // n` where n is num_rows / num_slices.
      num_tokens: pieces of the vocabulary.
      wants_log_probs: whether to compute log p, of one token of each.
    """
    # Few feeds: each costs a twentieth of the step of a small model.
    count = tf.placeholder(tf.int32, [], "count")
    texts = tf.placeholder(tf.int32, [num_rows, 6], "texts")
    shares = tf.placeholder(tf.float32, [num_rows, 2], "shares")
    tokens, positions, places, *_, top_k = tf.unstack(texts, axis=1)
    temperature, top_p = tf.unstack(shares, axis=1)
    keys = texts[:, 3:5]
    if self._model.weights.is_packed:
      steps = self._decoder.text_steps(
        count,
        Texts(
          *(tokens, positions, places, tf.fill([num_rows], False), keys),
          *(temperature, top_k, top_p),
        ),
        self._read(),
        num_tokens=num_tokens,
        eod_id=-1,  # whoever reads the texts knows their ends
        keeps_logits=wants_log_probs,
      )
      logits, after = steps.logits, steps.cache
      choices = (steps.chosen,) * 3  # C++ has one price
    else:
      split = [split_rows(self._impl, x) for x in (tokens, positions)]
      logits, after = self._decoder.step(*split, self._read())
      logits = join_rows(self._impl, logits)
      settings = RowSettings(temperature, top_k, top_p)
      found = next_tokens_of_rows(logits, keys, places, settings, num_tokens)
      choices = tuple(x[:, tf.newaxis] for x in found)
    return StepProgram(
      count=count,
      texts=texts,
      shares=shares,
      choices=choices,
      log_probs=_log_probs(logits, choices, num_tokens)
      if wants_log_probs
      else (),
      update=assign_all(self._cache, after),
    )

  def _prefill(self, prompts: tf.Tensor, lengths: LaidOut) -> list[LaidOut]:
    return prefill(self._model.weights, prompts, lengths, self._memory_length)

  def _read(self) -> list[LaidOut]:
    return [
      self._impl.slicewise(lambda v: v.read_value(), x) for x in self._cache
    ]


def _log_probs(logits, choices, num_tokens):
  logits = tf.cast(logits, tf.float32)
  log_probs = logits - tf.reduce_logsumexp(logits, -1, keepdims=True)
  k = min(NUM_LIKELIEST, num_tokens)
  top, likeliest = tf.math.top_k(allowed(log_probs, num_tokens), k)
  return tuple(
    LogProbs(tf.gather(log_probs, x[:, 0], batch_dims=1), likeliest, top)
    for x in choices
  )


def _replaced(cache, new, at):
  # In place, as a step writes its token: another slot costs nothing. Where the
  # prompt belongs to another device, a row is replaced by itself.
  row = tf.maximum(at, 0)
  is_here = tf.reshape(at >= 0, [-1, *[1] * (cache.shape.rank - 1)])
  value = tf.where_v2(is_here, new, tf.gather(cache, row))
  return tf.raw_ops.InplaceUpdate(x=cache, i=row, v=value)
