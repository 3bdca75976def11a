# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sampling and beam search, as the loop of the decode program runs them."""

import dataclasses

from palm_mtf._tf import tf
from palm_mtf.config import DecodeConfig
from palm_mtf.generation.decode import beam_search
from palm_mtf.generation.decode.sampling import next_tokens

# Both strategies keep a state on each device, a list of tensors that the loop
# carries, and return the next token of each row.

# Rows of the cache that fill vector registers are read twice as fast.
_ALIGNMENT = 64


def aligned_length(positions: int) -> int:
  """Returns the positions of a cache that has at least so many."""
  return -(-positions // _ALIGNMENT) * _ALIGNMENT


@dataclasses.dataclass(frozen=True)
class PromptBatch:
  """Sizes of one batch of prompts."""

  num_prompts: int  # divisible by the mesh axis of `batch`
  prompt_tokens: int  # of the longest prompt, with what stands before the text
  max_tokens: int  # of a continuation
  num_tokens: int  # pieces of the vocabulary
  eod_id: int  # token that ends a continuation

  @property
  def memory_length(self) -> int:
    """Positions of the cache."""
    # The last token of a continuation is never read.
    return aligned_length(self.prompt_tokens + self.max_tokens - 1)


class Sampling:
  """Samples tokens of independent rows (sampling.py), greedy too."""

  # State: tokens [rows, max_tokens] int32; whether a row has ended, [rows]
  # bool; with a repetition penalty the tokens it has, [rows, vocab] bool.

  def __init__(self, config: DecodeConfig, sizes: PromptBatch):
    self._config = config
    self._sizes = sizes

  def first_state(self, prompts, lengths, vocab_size):
    """Returns the state before the first token."""
    num_prompts, length = prompts.shape
    rows = num_prompts * self._config.num_samples
    tokens = tf.fill([rows, self._sizes.max_tokens], self._sizes.eod_id)
    state = [tokens, tf.fill([rows], False)]
    if self._config.repetition_penalty != 1:
      place = tf.range(length)
      is_text = (place > 0) & (place < lengths[:, tf.newaxis])
      row = tf.broadcast_to(tf.range(num_prompts)[:, tf.newaxis], prompts.shape)
      counts = tf.scatter_nd(
        tf.stack([row, prompts], -1),
        tf.cast(is_text, tf.int32),
        [num_prompts, vocab_size],
      )
      state.append(repeat(counts > 0, self._config.num_samples))
    return state

  def choose(self, logits, place, key, *state):
    """Returns the next token of each row, and the state."""
    tokens, is_over, *seen = state
    token = next_tokens(
      logits,
      seen[0] if seen else tf.constant(False),
      key,
      place,
      self._config,
      self._sizes.num_tokens,
    )
    token = tf.where_v2(is_over, self._sizes.eod_id, token)
    at = tf.equal(tf.range(tokens.shape[1]), place)
    tokens = tf.where_v2(at, token[:, tf.newaxis], tokens)
    is_over |= tf.equal(token, self._sizes.eod_id)
    if seen:
      seen[0] |= tf.one_hot(token, seen[0].shape[1], True, False, dtype=tf.bool)
    return (token, tokens, is_over, *seen)

  def results(self, state):
    """Returns tokens, whether each row has ended, and no scores."""
    return state[0], state[1], None


class Beams:
  """Runs a beam search for each prompt (beam_search.py)."""

  def __init__(self, config: DecodeConfig, sizes: PromptBatch):
    self._settings = beam_search.BeamSettings(
      num_beams=config.num_beams,
      length_penalty=config.length_penalty,
      max_tokens=sizes.max_tokens,
      eod_id=sizes.eod_id,
      num_tokens=sizes.num_tokens,
    )

  def first_state(self, prompts, lengths, vocab_size):
    """Returns the state before the first token."""
    del lengths, vocab_size
    return beam_search.first_state(prompts.shape[0], self._settings)

  def choose(self, logits, place, key, *state):
    """Returns the next token of each row, the state, and rows to copy."""
    # A prefix may die and another have two continuations: its row's cache
    # becomes that of both.
    del key
    state, token, rows = beam_search.advance(
      state, logits, place, self._settings
    )
    return (token, *state, rows)

  def results(self, state):
    """Returns tokens, whether each search is over, and scores."""
    _, _, scores, tokens, is_over = state
    beams = scores.shape[1]
    return (
      tf.reshape(tokens, [-1, tokens.shape[-1]]),
      repeat(is_over, beams),
      tf.reshape(scores, [-1]),
    )


def repeat(x: tf.Tensor, times: int) -> tf.Tensor:
  """Repeats each row, with its copies side by side."""
  return x if times == 1 else tf.repeat(x, times, axis=0)
