# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Graphs that continue texts which begin and end at different times.

Each text has a slot, a row of the decoding batch and of the cache. One program
prefills a slot while the other slots wait; another program adds tokens to all
slots. If a layout splits `batch` into s slices, slot i is row i // s of slice
i % s. The first slots are thus the first rows of every slice, so that a step
can leave out the last slots.
"""

from palm_mtf._tf import tf
from palm_mtf.generation.decode.forward import NUM_LIKELIEST, prefill
from palm_mtf.generation.decode.rows import (
  Cache,
  LaidOut,
  assign_all,
  join_rows,
  read_all,
  repeat,
  split_rows,
)
from palm_mtf.generation.decode.sampling import mask_logits
from palm_mtf.generation.decode.step import make_step
from palm_mtf.generation.decode.weights import DecodeModel
from palm_mtf.native.decoding import Texts, TextSettings
from palm_mtf.ops.variables import make_variable
from palm_mtf.runtime.program import Program


class SlotPrograms:
  """Builds programs in the current tf.Graph; all programs share one cache."""

  def __init__(self, model: DecodeModel, num_slots: int, num_slices: int):
    """Makes the variables of the cache.

    `num_slots` is divisible by `num_slices`, the number of slices of `batch`.
    """
    self._model, self._impl = model, model.placement
    self._num_slices = num_slices
    self._step = make_step(model)
    # Initialize the cache by a prefill of one token, not by tf.zeros: equal
    # zeros would become one shared constant, and all variables of the cache
    # would use the memory of that constant.
    prompts = tf.zeros([num_slices, 1], tf.int32)
    lengths = split_rows(self._impl, tf.ones([num_slices], tf.int32))
    self._cache = [
      self._impl.slicewise(
        lambda x: make_variable(repeat(x, num_slots // num_slices), "slots"), x
      )
      for x in self._prefill(prompts, lengths)
    ]
    # Run this before any other program.
    self.initialize = Program(
      operations=[x.initializer for y in self._cache for x in y.tensor_list]
    )

  def insert(self, prompt_tokens: int) -> Program:
    """Builds the program that prefills slots, at most one per slice.

    Inputs:
      prompts: [slices, prompt_tokens], int32, left-aligned.
      lengths: [slices], int32: number of tokens per prompt.
      rows: [slices], int32: the row to prefill in each slice; -1 leaves the
        slice unchanged.
    """
    shape = [self._num_slices, prompt_tokens]
    prompts = tf.placeholder(tf.int32, shape, "prompts")
    lengths, rows = (
      tf.placeholder(tf.int32, shape[:1], name) for name in ("lengths", "rows")
    )
    new = self._prefill(prompts, split_rows(self._impl, lengths))
    at = split_rows(self._impl, rows)
    after = [
      self._impl.slicewise(_replace_row, x, y, at)
      for x, y in zip(read_all(self._impl, self._cache), new, strict=True)
    ]
    return Program(
      {"prompts": prompts, "lengths": lengths, "rows": rows},
      operations=[assign_all(self._cache, after)],
    )

  def step(
    self,
    num_rows: int,
    num_tokens: int,
    *,
    is_greedy: bool,
    has_limits: bool,
    wants_log_probs: bool,
  ) -> Program:
    """Builds the program that adds one token or several to the first slots.

    Args:
      num_rows: number of slots, divisible by `num_slices`. With n = num_rows /
        num_slices rows per slice, row i is slot `i % n * num_slices + i // n`.
      num_tokens: number of pieces in the vocabulary.
      is_greedy: whether all texts take the likeliest token.
      has_limits: whether TOP_K and TOP_P are applied; each takes 31 passes over
        the logits.
      wants_log_probs: whether to compute log p, for one token per text.

    Inputs:
      count: [], int32: number of tokens to choose per text. If log p is
        computed, `count` is ignored, and the program chooses one token.
      texts: [rows, 6], int32, per text: last token; the last token's position,
        from 0; number of tokens already drawn; random key, two numbers; TOP_K.
      shares: [rows, 2], float32, per text: TEMPERATURE and TOP_P.

    Outputs:
      The next tokens, [rows, count] int32. If `wants_log_probs`, also log p
      under the plain softmax, with no sampling setting applied: of the chosen
      tokens, [rows] float32; the likeliest tokens, [rows, NUM_LIKELIEST] int32;
      and their log p, [rows, NUM_LIKELIEST] float32.
    """
    # Pack the inputs into few placeholders, because feeding each placeholder
    # takes a twentieth of the time of a small model's step.
    count = tf.placeholder(tf.int32, [], "count")
    texts = tf.placeholder(tf.int32, [num_rows, 6], "texts")
    shares = tf.placeholder(tf.float32, [num_rows, 2], "shares")
    tokens, positions, places, *_, top_k, temperature, top_p, is_over, keys = (
      split_rows(self._impl, x)
      for x in (
        *tf.unstack(texts, axis=1),
        *tf.unstack(shares, axis=1),
        tf.fill([num_rows], False),
        texts[:, 3:5],
      )
    )
    steps = self._step.advance(
      tf.constant(1) if wants_log_probs else count,
      Texts(
        *(tokens, positions, places, is_over, keys),
        0.0 if is_greedy else temperature,
        top_k if has_limits else None,
        top_p if has_limits else 1.0,
      ),
      read_all(self._impl, self._cache),
      # The caller finds the end of each text.
      TextSettings(num_tokens, eod_id=-1, keeps_logits=wants_log_probs),
    )
    outputs = [join_rows(self._impl, steps.chosen)]
    if wants_log_probs:
      logits = join_rows(self._impl, steps.logits)
      outputs += _find_log_probs(logits, outputs[0][:, 0], num_tokens)
    return Program(
      {"count": count, "texts": texts, "shares": shares},
      outputs,
      operations=[assign_all(self._cache, steps.cache)],
    )

  def _prefill(self, prompts: tf.Tensor, lengths: LaidOut) -> Cache:
    length = self._model.config.sequence_length
    return prefill(self._model, prompts, lengths, length)


def _find_log_probs(logits, chosen, num_tokens):
  logits = tf.cast(logits, tf.float32)
  log_probs = logits - tf.reduce_logsumexp(logits, -1, keepdims=True)
  k = min(NUM_LIKELIEST, num_tokens)
  top, likeliest = tf.math.top_k(mask_logits(log_probs, num_tokens), k)
  of_chosen = tf.gather(log_probs, chosen, batch_dims=1)
  return of_chosen, likeliest, top


def _replace_row(cache, new, at):
  # Updates the cache in place, because copying all slots would cost time. If
  # `at` is -1, the slice gets no prompt, and row 0 is replaced by itself.
  row = tf.maximum(at, 0)
  is_here = tf.reshape(at >= 0, [-1, *[1] * (cache.shape.rank - 1)])
  value = tf.where_v2(is_here, new, tf.gather(cache, row))
  return tf.raw_ops.InplaceUpdate(x=cache, i=row, v=value)
