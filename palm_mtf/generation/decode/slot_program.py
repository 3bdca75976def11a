# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions for a server, whose texts begin and end at different times.

A text is a prompt and its continuation. Each text has a slot, a row of the
decoding batch and of the cache. One function prefills a slot while the other
slots wait; another function adds tokens to all slots. If a layout splits
`batch` into s slices, slot i is row i // s of slice i % s. The first slots are
thus the first rows of every slice, so that a step can leave out the last slots.

The state of these functions is the cache and, for prompt lookup, the history
of the texts in all slots (`Texts.history`).
"""

import dataclasses

from palm_mtf._tf import tf
from palm_mtf.generation.decode.forward import prefill, read_parts, reads_parts
from palm_mtf.generation.decode.functions import (
  Built,
  DecodeFunction,
  Effect,
  Inputs,
)
from palm_mtf.generation.decode.rows import (
  State,
  join_rows,
  split_rows,
  write_row,
)
from palm_mtf.generation.decode.sampling import mask_logits
from palm_mtf.generation.decode.score_program import NUM_LIKELIEST
from palm_mtf.generation.decode.step import make_step
from palm_mtf.generation.decode.weights import DecodeModel
from palm_mtf.native.adapters import keep_adapter
from palm_mtf.native.decoding import (
  MOST_DRAFTED,
  Texts,
  TextSettings,
  make_history,
  write_history,
)

# Maximum number of tokens that a call of `StepSlots` chooses per text. Shapes
# on accelerators are static: a call there returns this many (1 with log p).
MOST_STEPS = 256


def num_mask_words(num_tokens: int) -> int:
  """Returns the number of int32 words in a mask with a bit per token."""
  return -(-num_tokens // 32)


@dataclasses.dataclass(frozen=True)
class MakeSlots(DecodeFunction):
  """Makes the state of all slots.

  Outputs:
    most_drafted: [], int32: maximum number of tokens that a step can draft per
      text; 0 without prompt lookup.
    reads_parts: [], int32: 1 if `ReadParts` can read prompts, else 0.
    sends_tokens: [], int32: 1 if `StepSlots` sends tokens to a socket, else 0.
  """

  num_slots: int  # divisible by `num_slices`
  num_slices: int  # number of slices of `batch`
  prompt_lookup: bool = False  # applies to steps in C++

  effect = Effect.MAKES

  def output_dtypes(self) -> dict[str, tf.DType]:
    """Returns the dtype of each output."""
    names = "most_drafted", "reads_parts", "sends_tokens"
    return dict.fromkeys(names, tf.int32)

  def __call__(self, model: DecodeModel, state: State, inputs: Inputs) -> Built:
    """Builds a prefill with one token, which only gives the cache its shape."""
    prompts = tf.zeros([self.num_slices, 1], tf.int32)
    ones = split_rows(model.placement, tf.ones([self.num_slices], tf.int32))
    length = model.config.sequence_length
    copies = self.num_slots // self.num_slices
    cache = prefill(model, prompts, ones, length, copies)
    history = []
    if self.prompt_lookup and model.is_native:
      # Not a constant, because steps write the history in place. Comes after
      # the cache, so that it takes no memory if there is none for the cache.
      with tf.control_dependencies([x.tensor_list[0] for x in cache]):
        texts = tf.raw_ops.Empty(
          shape=[self.num_slots, 1], dtype=tf.int32, init=True
        )
      history = [split_rows(model.placement, make_history(texts, length + 1))]
    return [*cache, *history], {
      "most_drafted": tf.constant(MOST_DRAFTED * len(history)),
      "reads_parts": tf.constant(int(reads_parts(model))),
      "sends_tokens": tf.constant(int(model.is_native)),
    }


@dataclasses.dataclass(frozen=True)
class InsertPrompts(DecodeFunction):
  """Prefills slots, at most one per slice.

  Inputs:
    prompts: [slices, prompt_tokens], int32, left-aligned.
    lengths: [slices], int32: number of tokens per prompt.
    rows: [slices], int32: row to prefill in each slice; -1 changes nothing.
    adapter: only if `has_adapter`: [], int32: number of the prompts' adapter.
  """

  num_slices: int
  prompt_tokens: int
  has_adapter: bool = False

  effect = Effect.CHANGES

  def input_specs(self) -> dict[str, tf.TensorSpec]:
    """Returns shape and dtype of each input."""
    shapes = {
      "prompts": [self.num_slices, self.prompt_tokens],
      "lengths": [self.num_slices],
      "rows": [self.num_slices],
    }
    shapes |= {"adapter": []} if self.has_adapter else {}
    return {x: tf.TensorSpec(y, tf.int32) for x, y in shapes.items()}

  def __call__(self, model: DecodeModel, state: State, inputs: Inputs) -> Built:
    """Builds the prefill; returns the state with the new prompts."""
    model = dataclasses.replace(model, adapter=inputs.get("adapter"))
    impl, prompts = model.placement, inputs["prompts"]
    lengths, at = (split_rows(impl, inputs[x]) for x in ("lengths", "rows"))
    length = model.config.sequence_length
    # Steps in C++ read no key after a text's last token, so what older texts
    # left there may stay: to clear a long cache takes longer than a step.
    positions = self.prompt_tokens if model.is_packed else length
    new = prefill(model, prompts, lengths, positions)
    if len(state) > len(new):
      new = [*new, split_rows(impl, make_history(prompts, length + 1))]
    return [
      impl.slicewise(lambda *x: _replace_row(*x, model.row_axis), x, y, at)
      for x, y in zip(state, new, strict=True)
    ], {}


@dataclasses.dataclass(frozen=True)
class ReadParts(DecodeFunction):
  """Reads parts of the prompts of some slots, on one device.

  Inputs:
    parts: [3, num_tokens], int32: tokens, their slots and their positions, in
      the order that `read_parts` (forward.py) needs. The last columns may be
      copies of the first.
    count: [], int32: number of columns without these copies.
    adapter: only if `has_adapter`: [], int32: number of the prompts' adapter.
  """

  num_tokens: int
  has_adapter: bool = False

  effect = Effect.CHANGES

  def input_specs(self) -> dict[str, tf.TensorSpec]:
    """Returns shape and dtype of each input."""
    shapes: dict[str, list] = {"parts": [3, self.num_tokens], "count": []}
    shapes |= {"adapter": []} if self.has_adapter else {}
    return {x: tf.TensorSpec(y, tf.int32) for x, y in shapes.items()}

  def __call__(self, model: DecodeModel, state: State, inputs: Inputs) -> Built:
    """Builds the forward pass; returns the state with the parts."""
    model = dataclasses.replace(model, adapter=inputs.get("adapter"))
    num_cache = len(state) - len(state) % 2
    parts = tf.unstack(inputs["parts"])
    cache = read_parts(model, parts, inputs["count"], state[:num_cache])
    history = [
      model.placement.slicewise(lambda x: write_history(x, *parts), x)
      for x in state[num_cache:]
    ]
    return [*cache, *history], {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSlots(DecodeFunction):
  """Adds one or more tokens to the text in each of the first slots.

  Inputs:
    call: [2], int32: number of steps to run, at most MOST_STEPS; descriptor of
      a socket (`TextSettings.socket`), or -1. If log p is computed, or there
      are masks, the first number is ignored, and there is one step.
    texts: [rows, 8 + drafted], int32, per text: last token; its position, from
      0; number of tokens already drawn; random key, two numbers; TOP_K, at
      least 1 (`num_tokens` keeps all tokens); maximum number of tokens to
      choose, which only steps in C++ need (a limit of 0 leaves the row out);
      number of its adapter, 0 for none, which only steps in C++ add; drafted
      tokens, which the step reads after the last token, then -1.
    shares: [rows, 2], float32, per text: TEMPERATURE and TOP_P.
    masks: only with masks: [rows * masks, words], int32, per text: bit i % 32
      of word i // 32 says whether token i is allowed after the last token, and
      after each drafted token.

  Outputs:
    tokens: [rows, columns], int32: the next tokens of each text, at least one
      per step up to its limit; then -1.
    drafts: only if tokens are drafted: [rows, drafted], int32: what the next
      call should draft if all rows keep the chosen tokens, then -1.
    If `wants_log_probs`, also log p under the plain softmax, with no sampling
    setting applied:
    of_chosen: [rows], float32: log p of the chosen tokens.
    likeliest: [rows, NUM_LIKELIEST], int32: the likeliest tokens.
    of_likeliest: [rows, NUM_LIKELIEST], float32: log p of these tokens.
  """

  # The step runs the first `num_rows` slots; divisible by the number of slices.
  # With s slices and n = num_rows / s rows per slice, row i is slot
  # `i % n * s + i // n`.
  num_rows: int
  num_tokens: int  # number of pieces in the vocabulary
  is_greedy: bool  # whether all texts take the likeliest token
  # Whether TOP_K and TOP_P are applied; each takes 31 passes over the logits.
  has_limits: bool
  wants_log_probs: bool  # whether to compute log p, for one token per text
  # Masks per text, 1 more than drafted tokens; 0 for no masks.
  num_masks: int = 0

  effect = Effect.CHANGES

  def input_specs(self) -> dict[str, tf.TensorSpec]:
    """Returns shape and dtype of each input."""
    columns = 8 + max(self.num_masks - 1, 0)
    # Few inputs, because to feed one takes 5% of the time of a small step.
    specs = {
      "call": tf.TensorSpec([2], tf.int32),
      "texts": tf.TensorSpec([self.num_rows, columns], tf.int32),
      "shares": tf.TensorSpec([self.num_rows, 2], tf.float32),
    }
    if self.num_masks:
      shape = self.num_rows * self.num_masks, num_mask_words(self.num_tokens)
      specs["masks"] = tf.TensorSpec(shape, tf.int32)
    return specs

  def output_dtypes(self) -> dict[str, tf.DType]:
    """Returns the dtype of each output."""
    found = {"tokens": tf.int32}
    found |= {"drafts": tf.int32} if self.num_masks > 1 else {}
    if self.wants_log_probs:
      found |= {"of_chosen": tf.float32, "likeliest": tf.int32}
      found["of_likeliest"] = tf.float32
    return found

  def __call__(self, model: DecodeModel, state: State, inputs: Inputs) -> Built:
    """Builds the steps; returns the state after the steps, and the outputs."""
    impl, texts = model.placement, inputs["texts"]
    tokens, positions, places, _, _, top_k, limits, adapters, *others = (
      split_rows(impl, x)
      for x in (
        *tf.unstack(texts[:, :8], axis=1),
        *tf.unstack(inputs["shares"], axis=1),
        tf.fill([self.num_rows], False),
        texts[:, 3:5],
      )
    )
    temperature, top_p, is_over, keys = others
    is_single = self.wants_log_probs or self.num_masks
    masks = [split_rows(impl, inputs["masks"])] if self.num_masks else []
    # A cache has pairs of tensors, keys and values.
    num_cache = len(state) - len(state) % 2
    count, socket = tf.unstack(inputs["call"])
    steps = make_step(model).advance(
      tf.constant(1) if is_single else count,
      Texts(
        *(tokens, positions, places, is_over, keys),
        0.0 if self.is_greedy else temperature,
        top_k if self.has_limits else None,
        top_p if self.has_limits else 1.0,
        limits=limits,
        history=state[num_cache:],
        masks=masks,
        adapters=[adapters] if model.is_packed else [],
        drafts=[split_rows(impl, texts[:, 8:])] if self.num_masks > 1 else [],
      ),
      state[:num_cache],
      # No token ends a text here: the caller finds the ends.
      TextSettings(
        self.num_tokens,
        end_ids=(-1,),
        keeps_logits=self.wants_log_probs,
        most_steps=1 if is_single else MOST_STEPS,
        socket=socket,
      ),
    )
    outputs = {"tokens": join_rows(impl, steps.chosen)}
    if self.num_masks > 1:
      outputs["drafts"] = join_rows(impl, *steps.drafts)
    if self.wants_log_probs:
      logits = join_rows(impl, steps.logits)
      chosen = tf.maximum(outputs["tokens"][:, 0], 0)  # -1 if left out
      outputs |= _find_log_probs(logits, chosen, self.num_tokens)
    return [*steps.cache, *steps.history], outputs


@dataclasses.dataclass(frozen=True)
class KeepAdapter(DecodeFunction):
  """Keeps an adapter under a number, or drops it.

  Inputs:
    number, parts, values: as `keep_adapter` takes them.

  Outputs:
    kept: int32: number of adapters that are kept; -1 if steps are not in C++,
      so that nothing can add adapters.
  """

  effect = Effect.READS

  def input_specs(self) -> dict[str, tf.TensorSpec]:
    """Returns shape and dtype of each input."""
    return {
      "number": tf.TensorSpec([], tf.int32),
      "parts": tf.TensorSpec([None, 6], tf.int32),
      "values": tf.TensorSpec([None], tf.float32),
    }

  def output_dtypes(self) -> dict[str, tf.DType]:
    """Returns the dtype of each output."""
    return {"kept": tf.int32}

  def __call__(self, model: DecodeModel, state: State, inputs: Inputs) -> Built:
    """Builds the operation; returns the same state, and the output."""
    if not model.is_native:
      return state, {"kept": tf.constant(-1)}
    dtype = tf.as_dtype(model.config.activation_dtype)
    return state, {"kept": keep_adapter(**inputs, dtype=dtype)}


def _find_log_probs(logits, chosen, num_tokens):
  logits = tf.cast(logits, tf.float32)
  log_probs = logits - tf.reduce_logsumexp(logits, -1, keepdims=True)
  k = min(NUM_LIKELIEST, num_tokens)
  top, likeliest = tf.math.top_k(mask_logits(log_probs, num_tokens), k)
  return {
    "of_chosen": tf.gather(log_probs, chosen, batch_dims=1),
    "likeliest": likeliest,
    "of_likeliest": top,
  }


def _replace_row(cache, new, at, axis):
  # If `at` is -1, the slice gets no prompt, and row 0 is replaced by itself.
  row = tf.maximum(at[0], 0)
  begin = [row if i == axis else 0 for i in range(cache.shape.rank)]
  old = tf.slice(cache, begin, new.shape)
  value = tf.where_v2(at[0] >= 0, new, old)
  return write_row(cache, row, value, axis)
