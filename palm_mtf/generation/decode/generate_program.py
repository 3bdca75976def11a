# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Graph that continues texts: a prefill, then a loop of decoding steps."""

import dataclasses

from palm_mtf._tf import tf
from palm_mtf.config import DecodeConfig
from palm_mtf.generation.decode.beam_search import BeamSearch
from palm_mtf.generation.decode.forward import prefill
from palm_mtf.generation.decode.rows import (
  Cache,
  LaidOut,
  assign_all,
  join_rows,
  read_all,
  repeat,
  split_rows,
)
from palm_mtf.generation.decode.step import make_step, repeat_step
from palm_mtf.generation.decode.weights import DecodeModel
from palm_mtf.native.decoding import Texts
from palm_mtf.ops.variables import make_variable

# `start` prefills the cache. Each `advance` adds tokens, up to a limit or until
# every row has ended. Variables keep the state in between, so that a caller can
# show tokens before the text is complete. The NUM_SAMPLES or NUM_BEAMS rows of
# one prompt are adjacent.


@dataclasses.dataclass(frozen=True)
class PromptBatch:
  """Sizes of one batch of prompts."""

  num_prompts: int  # divisible by the number of slices of `batch`
  prompt_tokens: int  # length of padded prompts, with the start token
  max_tokens: int  # maximum length of a continuation
  num_tokens: int  # number of pieces in the vocabulary
  eod_id: int  # token that ends a continuation


@dataclasses.dataclass(frozen=True)
class DecodeProgram:
  """Continues a batch of prompts; each prompt has a row per sample or beam.

  Attributes:
    prompts: placeholder [prompts, prompt_tokens], int32, left-aligned.
    lengths: placeholder [prompts], int32: number of tokens per prompt.
    keys: placeholder [prompts, rows, 2], int32: random key of each row.
    start: operation that prefills the cache with the prompts.
    limit: placeholder [], int32: number of tokens per row at which `advance`
      stops.
    advance: operation that adds tokens, by sampling or beam search.
    tokens: [prompts, rows, max_tokens], int32: continuations, [eod] after the
      end. With beam search: the ended texts found so far, best first.
    num_done: [], int32: number of tokens per row so far.
    is_over: [prompts, rows], bool: whether the row has ended; with beam search,
      whether the prompt's search is over.
    scores: [prompts, rows], float32: beam search scores; None for sampling.
  """

  prompts: tf.Tensor
  lengths: tf.Tensor
  keys: tf.Tensor
  start: tf.Operation
  limit: tf.Tensor
  advance: tf.Operation
  tokens: tf.Tensor
  num_done: tf.Tensor
  is_over: tf.Tensor
  scores: tf.Tensor | None


def build_decode_program(
  model: DecodeModel, decode: DecodeConfig, sizes: PromptBatch
) -> DecodeProgram:
  """Builds the program for batches of one size in the current tf.Graph."""
  prompts = tf.placeholder(
    tf.int32, [sizes.num_prompts, sizes.prompt_tokens], "prompts"
  )
  lengths = tf.placeholder(tf.int32, [sizes.num_prompts], "lengths")
  rows = decode.rows_per_prompt
  keys = tf.placeholder(tf.int32, [sizes.num_prompts, rows, 2], "keys")
  limit = tf.placeholder(tf.int32, [], "limit")
  make = _Searches if decode.num_beams > 1 else _Samples
  texts = make(model, decode, sizes)
  start = texts.start(prompts, lengths, keys)
  tokens, is_over, *scores = texts.results()
  by_prompt = [sizes.num_prompts, rows]
  return DecodeProgram(
    prompts=prompts,
    lengths=lengths,
    keys=keys,
    start=start,
    limit=limit,
    advance=texts.advance(limit),
    tokens=tf.reshape(tokens, [*by_prompt, sizes.max_tokens]),
    num_done=texts.place.read_value(),
    is_over=tf.reshape(is_over, by_prompt),
    scores=tf.reshape(scores[0], by_prompt) if scores else None,
  )


class _Continuations:
  """Base class of sampling and beam search.

  A subclass has a state, a list of laid-out tensors. The first tensor says
  which rows or searches have ended; the second holds the rows' last tokens.
  """

  def __init__(
    self, model: DecodeModel, decode: DecodeConfig, sizes: PromptBatch
  ):
    self._model, self._impl = model, model.placement
    self._step = make_step(model)
    self._decode, self._sizes = decode, sizes
    self.place = make_variable(tf.constant(0), "place")
    # `start` fills these lists with variables.
    self._fixed: list[LaidOut] = []  # prompt lengths and random keys of rows
    self._state: list[LaidOut] = []
    self._cache: Cache = []

  def start(
    self, prompts: tf.Tensor, lengths: tf.Tensor, keys: tf.Tensor
  ) -> tf.Operation:
    """Makes the variables; builds the operation that prefills the cache."""
    rows = self._decode.rows_per_prompt
    lengths, keys = (split_rows(self._impl, x) for x in (lengths, keys))
    # The last token of a continuation is never read, so it needs no position.
    positions = self._sizes.prompt_tokens + self._sizes.max_tokens - 1
    cache = prefill(self._model, prompts, lengths, positions)
    state = self._impl.slicewise(
      self._first_state, split_rows(self._impl, prompts), lengths
    )
    # Prefill each prompt once, and copy its keys and values to all its rows.
    lengths, *cache = (
      self._impl.slicewise(lambda x: repeat(x, rows), x)
      for x in (lengths, *cache)
    )
    keys = self._impl.slicewise(lambda x: tf.reshape(x, [-1, 2]), keys)
    self._fixed, self._state, self._cache = (
      [self._make_variable(x) for x in some]
      for some in ([lengths, keys], state, cache)
    )
    variables = [*self._fixed, *self._state, *self._cache]
    return tf.group(
      self.place.assign(0),
      assign_all(variables, [lengths, keys, *state, *cache]),
    )

  def advance(self, limit: tf.Tensor) -> tf.Operation:
    """Builds the steps that continue each row to `limit` new tokens."""
    place = self.place.read_value()
    fixed, state, cache = (
      read_all(self._impl, x) for x in (self._fixed, self._state, self._cache)
    )
    place, state, cache = self._advance(limit, place, *fixed, state, cache)
    variables = [*self._state, *self._cache]
    return tf.group(
      self.place.assign(place), assign_all(variables, [*state, *cache])
    )

  def results(self) -> list[tf.Tensor]:
    """Returns tokens, whether rows have ended, and a beam search's scores."""
    state = read_all(self._impl, self._state)
    found = self._impl.slicewise(self._read_results, *state)
    return [join_rows(self._impl, x) for x in found]

  def _make_variable(self, x: LaidOut) -> LaidOut:
    return self._impl.slicewise(
      lambda x: make_variable(tf.zeros(x.shape, x.dtype), "state"), x
    )

  def _find_positions(self, lengths: LaidOut, place: tf.Tensor) -> LaidOut:
    return self._impl.slicewise(lambda n: n + place - 1, lengths)


class _Samples(_Continuations):
  """Samples tokens of independent rows, or decodes greedily.

  The state: whether rows have ended; the rows' last tokens; all tokens chosen
  so far, [rows, max_tokens]. If there is a repetition penalty, also whether
  each token of the vocabulary occurs in the row, [rows, vocab] bool.
  """

  def _first_state(self, prompts, lengths):
    num_prompts, length = prompts.shape
    num_samples, vocab_size = (
      self._decode.num_samples,
      self._model.config.vocab_size,
    )
    rows = num_prompts * num_samples
    last = tf.gather(prompts, lengths - 1, batch_dims=1)
    tokens = tf.fill([rows, self._sizes.max_tokens], self._sizes.eod_id)
    state = [tf.fill([rows], False), repeat(last, num_samples), tokens]
    if self._decode.repetition_penalty != 1:
      place = tf.range(length)
      is_text = (place > 0) & (place < lengths[:, tf.newaxis])
      row = tf.broadcast_to(tf.range(num_prompts)[:, tf.newaxis], prompts.shape)
      counts = tf.scatter_nd(
        tf.stack([row, prompts], -1),
        tf.cast(is_text, tf.int32),
        [num_prompts, vocab_size],
      )
      state.append(repeat(counts > 0, num_samples))
    return tuple(state)

  def _advance(self, limit, place, lengths, keys, state, cache):
    is_over, last, tokens, *seen = state
    places = self._impl.slicewise(lambda n: tf.fill(n.shape, place), lengths)
    decode, eod_id = self._decode, self._sizes.eod_id
    steps = self._step.advance(
      limit - place,
      Texts(
        *(last, self._find_positions(lengths, place), places, is_over, keys),
        # A gin file may set 1 for 1.0, but the C++ operation takes no int.
        *(float(decode.temperature), decode.top_k, float(decode.top_p), seen),
      ),
      cache,
      num_tokens=self._sizes.num_tokens,
      eod_id=eod_id,
      repetition_penalty=decode.repetition_penalty,
    )
    after = place + tf.shape(steps.chosen.tensor_list[0])[1]

    def put(is_over, last, tokens, chosen):
      parts = [tokens[:, :place], chosen, tokens[:, after:]]
      return (
        is_over | tf.reduce_any(tf.equal(chosen, eod_id), 1),
        tf.concat([last[:, tf.newaxis], chosen], 1)[:, -1],
        tf.ensure_shape(tf.concat(parts, 1), tokens.shape),
      )

    state = self._impl.slicewise(put, is_over, last, tokens, steps.chosen)
    return after, [*state, *steps.seen], steps.cache

  def _read_results(self, is_over, last, tokens, *seen):
    del last, seen
    return tokens, is_over


class _Searches(_Continuations):
  # Beam search. The state: whether searches are over; the rows' last tokens;
  # then the other tensors of the state of `BeamSearch`.

  def __init__(
    self, model: DecodeModel, decode: DecodeConfig, sizes: PromptBatch
  ):
    super().__init__(model, decode, sizes)
    self._search = BeamSearch(
      num_beams=decode.num_beams,
      length_penalty=decode.length_penalty,
      max_tokens=sizes.max_tokens,
      eod_id=sizes.eod_id,
      num_tokens=sizes.num_tokens,
    )

  def _first_state(self, prompts, lengths):
    last = tf.gather(prompts, lengths - 1, batch_dims=1)
    is_over, *state = self._search.first_state(prompts.shape[0])
    return (is_over, repeat(last, self._search.num_beams), *state)

  def _advance(self, limit, place, lengths, keys, state, cache):
    del keys
    num_state = len(state)

    def choose(logits, place, is_over, *state):
      (is_over, *state), last, rows = self._search.advance(
        [is_over, *state], logits, place
      )
      return (is_over, last, *state, rows)

    def step(place, state):
      is_over, last, *search = state[:num_state]
      logits, cache = self._step.read(
        last, self._find_positions(lengths, place), state[num_state:]
      )
      *state, rows = self._impl.slicewise(
        lambda logits, *x: choose(logits, place, *x), logits, is_over, *search
      )
      # Each row copies the keys and values of the prefix that it continues,
      # because one prefix may have two continuations, and another none.
      cache = [self._impl.slicewise(tf.gather, x, rows) for x in cache]
      return [*state, *cache]

    place, state = repeat_step(self._impl, step, [*state, *cache], place, limit)
    return place, state[:num_state], state[num_state:]

  def _read_results(self, is_over, last, living, prefixes, scores, tokens):
    del last, living, prefixes
    return (
      tf.reshape(tokens, [-1, tokens.shape[-1]]),
      repeat(is_over, self._search.num_beams),
      tf.reshape(scores, [-1]),
    )
