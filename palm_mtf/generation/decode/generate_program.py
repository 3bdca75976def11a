# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions that continue prompts: a prefill, then a loop of decoding steps."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

from palm_mtf._tf import tf
from palm_mtf.config import DecodeConfig
from palm_mtf.generation.decode.forward import prefill
from palm_mtf.generation.decode.functions import (
  BuildProgram,
  Built,
  DecodeFunction,
  Effect,
  Inputs,
)
from palm_mtf.generation.decode.prompt_batch import PromptBatch
from palm_mtf.generation.decode.rows import State, join_rows, repeat, split_rows
from palm_mtf.generation.decode.sampling import is_among, mask_logits
from palm_mtf.generation.decode.step import make_step, repeat_step
from palm_mtf.generation.decode.weights import DecodeModel
from palm_mtf.native.decoding import Texts, TextSettings, make_history
from palm_mtf.ops.placement import LaidOut
from palm_mtf.ops.xla import fused
from palm_mtf.runtime.program import Program

# A caller advances a batch by a few tokens per call, so that it can show tokens
# before the continuation is complete. The devices keep the state of the batch
# between these calls. The NUM_SAMPLES or NUM_BEAMS rows of a prompt are
# adjacent.

# While beam search has too few prefixes or ended continuations, this number
# replaces their log p or score. Every real log p or score is larger.
_NEVER = -1e30


@dataclasses.dataclass(frozen=True)
class _OfBatch(DecodeFunction):
  """Base class of the functions that continue a batch of prompts.

  The state has these tensors: the number of new tokens in each row so far, []
  int32; the number of tokens in each row's prompt, [rows] int32; random keys,
  [rows, 2] int32; the tensors of `_Samples` (sampling) or `_Searches` (beam
  search); and the cache.
  """

  decode: DecodeConfig
  sizes: PromptBatch

  def _make_texts(self, model: DecodeModel) -> "_Samples | _Searches":
    make = _Searches if self.decode.num_beams > 1 else _Samples
    return make(model, self.decode, self.sizes)


@dataclasses.dataclass(frozen=True)
class StartTexts(_OfBatch):
  """Prefills the cache; each prompt has a row per sample or beam.

  Inputs:
    prompts: [prompts, prompt_tokens], int32, left-aligned.
    lengths: [prompts], int32: number of tokens per prompt.
    keys: [prompts, rows per prompt, 2], int32: random key of each row.
  """

  effect = Effect.MAKES

  def input_specs(self) -> dict[str, tf.TensorSpec]:
    """Returns shape and dtype of each input."""
    num, rows = self.sizes.num_prompts, self.decode.rows_per_prompt
    shapes = {
      "prompts": [num, self.sizes.prompt_tokens],
      "lengths": [num],
      "keys": [num, rows, 2],
    }
    return {x: tf.TensorSpec(y, tf.int32) for x, y in shapes.items()}

  def __call__(self, model: DecodeModel, state: State, inputs: Inputs) -> Built:
    """Builds the prefill; returns the state before the first token."""
    impl, rows = model.placement, self.decode.rows_per_prompt
    prompts, lengths, keys = (
      split_rows(impl, inputs[x]) for x in ("prompts", "lengths", "keys")
    )
    # The last token of a continuation is never read, so it needs no position.
    positions = self.sizes.prompt_tokens + self.sizes.max_tokens - 1
    cache = prefill(model, inputs["prompts"], lengths, positions, rows)
    first = self._make_texts(model).first_state
    of_texts = impl.slicewise(first, prompts, lengths)
    place = impl.slicewise(lambda _: tf.constant(0), lengths)
    lengths = impl.slicewise(lambda x: repeat(x, rows), lengths)
    keys = impl.slicewise(lambda x: tf.reshape(x, [-1, 2]), keys)
    return [place, lengths, keys, *of_texts, *cache], {}


@dataclasses.dataclass(frozen=True)
class AdvanceTexts(_OfBatch):
  """Adds tokens until all rows have ended, or have `limit` new tokens.

  Inputs:
    limit: [], int32: new tokens per row since StartTexts, at most max_tokens.
  """

  effect = Effect.CHANGES

  def input_specs(self) -> dict[str, tf.TensorSpec]:
    """Returns shape and dtype of `limit`."""
    return {"limit": tf.TensorSpec([], tf.int32)}

  def __call__(self, model: DecodeModel, state: State, inputs: Inputs) -> Built:
    """Builds the loop of steps; returns the state after the last step."""
    texts = self._make_texts(model)
    place, lengths, keys, *rest = state
    of_texts, cache = rest[: texts.num_tensors], rest[texts.num_tensors :]
    after, of_texts, cache = texts.advance(
      *(inputs["limit"], place.tensor_list[0], lengths, keys, of_texts, cache)
    )
    place = model.placement.slicewise(lambda _: tf.identity(after), place)
    return [place, lengths, keys, *of_texts, *cache], {}


@dataclasses.dataclass(frozen=True)
class ReadTexts(_OfBatch):
  """Returns the continuations so far.

  Outputs:
    tokens: [prompts, rows, max_tokens], int32: continuations, filled after
      their ends. With beam search: the ended continuations found so far, best
      first.
    num_done: [], int32: number of new tokens per row so far.
    is_over: [prompts, rows], bool: whether the row has ended; with beam search,
      whether the prompt's search is over.
    scores: [prompts, beams], float32, only with beam search: the scores of
      `tokens`; -1e30 where fewer continuations than beams have ended.
  """

  effect = Effect.READS

  def output_dtypes(self) -> dict[str, tf.DType]:
    """Returns the dtype of each output."""
    found = {"tokens": tf.int32, "num_done": tf.int32, "is_over": tf.bool}
    return found | ({"scores": tf.float32} if self.decode.num_beams > 1 else {})

  def __call__(self, model: DecodeModel, state: State, inputs: Inputs) -> Built:
    """Returns the same state, and the outputs."""
    impl, texts = model.placement, self._make_texts(model)
    place, _, _, *rest = state
    found = impl.slicewise(texts.read_results, *rest[: texts.num_tensors])
    outputs = {"num_done": place.tensor_list[0]}
    # Only beam search has a third result, the scores.
    for name, x in zip(("tokens", "is_over", "scores"), found, strict=False):
      x = join_rows(impl, x)  # [rows, ...]
      outputs[name] = tf.reshape(x, [self.sizes.num_prompts, -1, *x.shape[1:]])
    return state, outputs


class DecodePrograms(NamedTuple):
  """Programs for batches of one size; a prompt has a row per sample or beam."""

  start: Program  # prefills a batch: StartTexts
  advance: Program  # adds tokens: AdvanceTexts
  read: Program  # returns the continuations: ReadTexts


def build_decode_programs(
  build: BuildProgram, decode: DecodeConfig, sizes: PromptBatch
) -> DecodePrograms:
  """Builds the programs for batches of one size in the current tf.Graph."""
  functions = StartTexts, AdvanceTexts, ReadTexts
  return DecodePrograms(*(build(x(decode, sizes), "texts") for x in functions))


class _Continuations:
  """Base class of sampling and beam search.

  A subclass has a state, a list of `num_tensors` tensors. The first tensor says
  which rows or searches have ended, so that the loop of steps can stop; the
  second holds the rows' last tokens, which the next step reads.
  """

  def __init__(
    self, model: DecodeModel, decode: DecodeConfig, sizes: PromptBatch
  ):
    self._model, self._impl = model, model.placement
    self._decode, self._sizes = decode, sizes

  def _find_positions(self, lengths: LaidOut, place: tf.Tensor) -> LaidOut:
    return self._impl.slicewise(lambda n: n + place - 1, lengths)


class _Samples(_Continuations):
  """Samples tokens of independent rows, or decodes greedily.

  The state has these tensors: whether rows have ended; the rows' last tokens;
  all tokens chosen so far, [rows, max_tokens]; with a repetition penalty,
  whether each token of the vocabulary occurs in the row, [rows, vocab] bool;
  and with prompt lookup, `Texts.history`.
  """

  @property
  def _penalizes(self) -> bool:
    return self._decode.repetition_penalty != 1

  @property
  def _looks_up(self) -> bool:
    return self._decode.prompt_lookup and self._model.is_native

  @property
  def num_tensors(self) -> int:
    return 3 + self._penalizes + self._looks_up

  def first_state(self, prompts, lengths):
    """Returns a device's slice of the state before the first token."""
    (num_prompts, length), num_samples = prompts.shape, self._decode.num_samples
    rows = num_prompts * num_samples
    last = tf.gather(prompts, lengths - 1, batch_dims=1)
    tokens = tf.fill([rows, self._sizes.max_tokens], self._sizes.end_ids[0])
    state = [tf.fill([rows], False), repeat(last, num_samples), tokens]
    if self._penalizes:
      place = tf.range(length)
      is_text = place < lengths[:, tf.newaxis]
      is_text &= place >= self._sizes.num_before
      row = tf.broadcast_to(tf.range(num_prompts)[:, tf.newaxis], prompts.shape)
      counts = tf.scatter_nd(
        tf.stack([row, prompts], -1),
        tf.cast(is_text, tf.int32),
        [num_prompts, self._model.config.vocab_size],
      )
      state.append(repeat(counts > 0, num_samples))
    if self._looks_up:
      history = make_history(prompts, length + self._sizes.max_tokens)
      state.append(repeat(history, num_samples))
    return tuple(state)

  def advance(self, limit, place, lengths, keys, state, cache):
    """Continues rows that have `place` new tokens until they have `limit`.

    Returns the number of new tokens per row, [] int32; the state; the cache.
    """
    is_over, last, tokens, *others = state
    seen, history = others[: self._penalizes], others[self._penalizes :]
    places = self._impl.slicewise(lambda n: tf.fill(n.shape, place), lengths)
    decode, end_ids = self._decode, self._sizes.end_ids
    steps = make_step(self._model).advance(
      limit - place,
      Texts(
        *(last, self._find_positions(lengths, place), places, is_over, keys),
        # A gin file may set 1 for 1.0, but the C++ operation takes no int.
        *(float(decode.temperature), decode.top_k, float(decode.top_p)),
        seen=seen,
        history=history,
      ),
      cache,
      TextSettings(
        self._sizes.num_tokens,
        end_ids,
        decode.repetition_penalty,
        most_steps=self._sizes.max_tokens,
      ),
    )
    after = place + steps.num_steps

    def put(is_over, last, tokens, chosen):
      at = tf.range(tokens.shape[1]) - place  # step that fills each column
      longer = tf.concat([last[:, tf.newaxis], chosen], 1)
      most = tf.shape(longer)[1] - 1
      put_here = tf.gather(longer, tf.clip_by_value(at + 1, 0, most), axis=1)
      is_new = (at >= 0) & (at < steps.num_steps)
      tokens = tf.where_v2(is_new, put_here, tokens)
      is_end = is_among(tokens, end_ids) & is_new
      return (
        is_over | tf.reduce_any(is_end, 1),
        tf.gather(longer, steps.num_steps, axis=1),
        tokens,
      )

    state = self._impl.slicewise(put, is_over, last, tokens, steps.chosen)
    return after, [*state, *steps.seen, *steps.history], steps.cache

  def read_results(self, is_over, last, tokens, *others):
    del last, others
    return tokens, is_over


class _Searches(_Continuations):
  # Beam search. The state has these tensors: whether searches are over; the
  # rows' last tokens; then the other tensors of the state of `BeamSearch`.

  num_tensors = 6

  def first_state(self, prompts, lengths):
    last = tf.gather(prompts, lengths - 1, batch_dims=1)
    search = BeamSearch(self._decode, self._sizes)
    is_over, *state = search.first_state(prompts.shape[0])
    return (is_over, repeat(last, self._decode.num_beams), *state)

  def advance(self, limit, place, lengths, keys, state, cache):
    del keys
    num_state, reader = len(state), make_step(self._model)
    search = BeamSearch(self._decode, self._sizes)

    def step(place, state):
      def choose(logits, *state):
        (is_over, *state), last, rows = search.advance(state, logits, place)
        return (is_over, last, *state, rows)

      is_over, last, *others = state[:num_state]
      logits, cache = reader.read(
        last, self._find_positions(lengths, place), state[num_state:]
      )
      *state, rows = self._impl.slicewise(choose, logits, is_over, *others)
      # Each row copies the keys and values of the prefix that it continues,
      # because one prefix may have two continuations, and another prefix none.
      take = functools.partial(tf.gather, axis=self._model.row_axis)
      cache = [self._impl.slicewise(take, x, rows) for x in cache]
      return [*state, *cache]

    place, state = repeat_step(self._impl, step, [*state, *cache], place, limit)
    return place, state[:num_state], state[num_state:]

  def read_results(self, is_over, last, living, prefixes, scores, tokens):
    del last, living, prefixes
    return (
      tf.reshape(tokens, [-1, tokens.shape[-1]]),
      repeat(is_over, self._decode.num_beams),
      tf.reshape(scores, [-1]),
    )


@fused
def _compute_log_probabilities(logits, num_tokens):
  return tf.nn.log_softmax(mask_logits(logits, num_tokens))


def _pick(x, index):
  return tf.gather(x, index, batch_dims=1)


class BeamSearch:
  """Keeps NUM_BEAMS prefixes to find the continuation with the best score.

    score = log p(tokens) / ((5 + length) / 6) ** LENGTH_PENALTY

  (Wu et al. 2016, equation 14). The end token counts in both log p and length.

  Each prompt has a separate search. A living prefix is a continuation that has
  not ended. The state of the searches is a list of:
    whether each search is over, [prompts] bool;
    log p of living prefixes, [prompts, beams] float32;
    tokens of living prefixes, [prompts, beams, max_tokens] int32;
    scores of ended continuations, [prompts, beams] float32;
    tokens of ended continuations, [prompts, beams, max_tokens] int32.
  """

  def __init__(self, decode: DecodeConfig, sizes: PromptBatch):
    self._num_beams, self._penalty = decode.num_beams, decode.length_penalty
    self._sizes = sizes

  def first_state(self, num_prompts: int) -> list[tf.Tensor]:
    """Returns the state before the first token."""
    shape = [num_prompts, self._num_beams]
    # At first all beams of a prompt are equal, so only the first beam lives.
    living = tf.where_v2(tf.equal(tf.range(shape[1]), 0), 0.0, _NEVER)
    tokens = tf.fill([*shape, self._sizes.max_tokens], self._sizes.end_ids[0])
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
      place: index of the new token in its continuation, [] int32.

    Returns:
      The state after this token; the new token of each living prefix, [prompts
      * beams] int32; and, for each living prefix, the index of the row of
      `logits` from which the new token was chosen, [prompts * beams] int32.
    """
    is_over, living, tokens, scores, ended = state
    (prompts, beams), vocab = living.shape, logits.shape[-1]
    sizes = self._sizes
    log_p = _compute_log_probabilities(logits, sizes.num_tokens)
    log_p = tf.reshape(log_p, [prompts, beams, vocab]) + living[..., tf.newaxis]
    log_p = tf.reshape(log_p, [prompts, beams * vocab])
    # Each prefix can end with each end token, so at most len(end_ids) * beams
    # of the best `count` continuations end now, and at least `beams` live on.
    count = (1 + len(sizes.end_ids)) * beams
    best, index = tf.math.top_k(log_p, min(count, beams * vocab))
    parent, token = index // vocab, index % vocab
    is_new = tf.equal(tf.range(sizes.max_tokens), place)
    longer = tf.where_v2(is_new, token[..., tf.newaxis], _pick(tokens, parent))
    ends = is_among(token, sizes.end_ids)
    ends |= tf.equal(place + 1, sizes.max_tokens)
    ends &= best > _NEVER / 2
    # Continuations that end now compete with those that ended earlier.
    new_scores = best / self._compute_divisor(place + 1)
    competes = ends & ~is_over[:, tf.newaxis]
    new_scores = tf.where_v2(competes, new_scores, _NEVER)
    scores, kept = tf.math.top_k(tf.concat([scores, new_scores], 1), beams)
    ended = _pick(tf.concat([ended, longer], 1), kept)
    living, kept = tf.math.top_k(tf.where_v2(ends, _NEVER, best), beams)
    # A search is over when no living prefix can beat the worst of `scores`. Log
    # p is negative and only falls, so the best score that a prefix can reach is
    # its present log p divided by the largest divisor, that of `max_tokens`.
    within_reach = living[:, 0] / self._compute_divisor(sizes.max_tokens)
    is_over |= scores[:, -1] >= within_reach
    first_row = tf.range(prompts)[:, tf.newaxis] * beams
    rows = tf.reshape(_pick(parent, kept) + first_row, [-1])
    state = [is_over, living, _pick(longer, kept), scores, ended]
    return state, tf.reshape(_pick(token, kept), [-1]), rows

  def _compute_divisor(self, length):
    length = tf.cast(length, tf.float32)
    return ((5.0 + length) / 6.0) ** self._penalty
