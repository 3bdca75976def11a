# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The decoding step: one more token per row, with cached keys and values.

  keys, values   [batch, memory_length, d_kv]              multi-query
                 [batch, key_heads, memory_length, d_kv]   other attention

A multi-query cache has 2 * num_layers * d_kv numbers per row and position. Rows
may be at different positions. There are two implementations of a step, in C++
(native/decoding.py) and by TensorFlow's operations.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.architecture.block import (
  NORMS,
  ROUTER_BIAS,
  Attention,
  Branch,
  Projection,
  Read,
  model_of,
)
from palm_mtf.architecture.parameters import layer_name
from palm_mtf.architecture.rotary import Rotary
from palm_mtf.config import ModelConfig
from palm_mtf.generation.decode.block import (
  add_and_scale,
  attend_to_cache,
  mix_products,
  run_layer,
)
from palm_mtf.generation.decode.rows import (
  Cache,
  flatten,
  have_ended,
  unflatten,
  write_places,
)
from palm_mtf.generation.decode.sampling import (
  SamplingSettings,
  choose_tokens,
  forbid_tokens,
  is_among,
)
from palm_mtf.generation.decode.weights import DecodeModel, joined_kernels
from palm_mtf.model.positions import sines_and_cosines
from palm_mtf.native.decoding import (
  StepWeights,
  Texts,
  TextSettings,
  TextSteps,
  run_decode_step,
  run_text_steps,
)
from palm_mtf.ops.placement import LaidOut, Placement
from palm_mtf.ops.slicewise import split_axes
from palm_mtf.ops.xla import in_xla_computation


def repeat_step(
  placement: Placement,
  step: Callable[[tf.Tensor, list[LaidOut]], list[LaidOut]],
  state: Sequence[LaidOut],
  first: tf.Tensor,
  limit: tf.Tensor,
) -> tuple[tf.Tensor, list[LaidOut]]:
  """Runs steps `first` to `limit` - 1; stops early once all rows have ended.

  Args:
    step: takes the step's number and the state; returns the new state.
    state: tensors; the first one says which rows have ended, [rows] bool.
    first, limit: step numbers, [] int32.

  Returns:
    The number of the last step plus 1, [] int32; and the state after this step.
  """
  # The loop carries the cache as plain tensors, so that each step can write its
  # keys and values into the cache in place. Every device takes part in
  # all-reduces, so no device may leave the loop before all rows on all devices
  # have ended.
  num_slices = len(state[0].tensor_list)

  def run(place, ended, *flat):
    del ended
    state = step(place, unflatten(placement, flat, num_slices))
    return [place + 1, have_ended(placement, state[0]), *flatten(state)]

  place, _, *flat = tf.while_loop(
    lambda place, ended, *unused: (place < limit) & ~ended,
    run,
    [first, have_ended(placement, state[0]), *flatten(state)],
  )
  return place, unflatten(placement, flat, num_slices)


def _find_angles(config: ModelConfig, length: int) -> list[np.ndarray]:
  # Returns sin and cos of each way to rotate, one way after another.
  rotaries = model_of(config).rotaries
  return [x for each in rotaries for x in sines_and_cosines(length, each)]


def _finish(model, logits, key):
  # Drops the logits of the embedding's padding rows, which are not tokens.
  # Mixes the others with an index of keys, if there is one.
  if logits.shape[1] > model.config.vocab_size:
    logits = logits[:, : model.config.vocab_size]
  if not model.mix:
    return logits
  inputs = [tf.cast(x, tf.float32) for x in (logits, key)]
  mixed = tf.numpy_function(model.mix, inputs, tf.float32)
  mixed.set_shape(logits.shape)
  return mixed


# --- Steps in C++ ------------------------------------------------------------


class NativeStep:
  """Steps with packed weights on one CPU: one C++ operation runs all steps.

  The methods have the arguments and results of `TensorflowStep`'s methods.
  """

  def __init__(self, model: DecodeModel):
    self._impl, self._config = model.placement, model.config
    self._model = model
    (self._table,) = model.weights["table"].tensor_list
    # The C++ step takes scales and kernels in the order in which it uses them.
    scales: list[LaidOut] = []
    kernels: list[str] = []
    routers: list[str] = []
    experts: list[str] = []
    for i, layer in enumerate(model_of(self._config).layers):
      joined = joined_kernels(self._config, i, is_packed=True)
      kernels += [x.names[0] for x in joined]
      if sparse := layer.sparse:
        router, first, *_ = sparse.inputs
        bias = [ROUTER_BIAS] if sparse.experts.has_bias else []
        routers += [f"{layer_name(i)}/{x}" for x in (router.part, *bias)]
        parts = first.part, sparse.output.part
        experts += [f"{layer_name(i)}/{x}" for x in parts]
      for each in layer.sums:
        (read,) = each.reads
        scales += model.norm_vectors(f"{layer_name(i)}/{read.norm}")
        scales += model.head_norm_scales(layer_name(i), read)
        if each.output_norm:
          scales += model.norm_vectors(f"{layer_name(i)}/{each.output_norm}")
    scales += model.make_last_norm()
    self._scales = [x.tensor_list[0] for x in scales]
    self._routers, self._kernels = (
      [model.weights[x].tensor_list[0] for x in names]
      for names in (routers, [*kernels, "to_logits", *experts])
    )

  def read(
    self, tokens: LaidOut, positions: LaidOut, cache: Cache
  ) -> tuple[LaidOut, Cache]:
    """Reads one token of every row; returns logits and the cache."""
    weights = self._make_weights(cache)

    def read(tokens, positions, *cache):
      logits, key, after = run_decode_step(weights, tokens, positions, cache)
      return (_finish(self._model, logits, key), *after)

    logits, *after = self._impl.slicewise(read, tokens, positions, *cache)
    return logits, after

  def advance(
    self, count: tf.Tensor, texts: Texts, cache: Cache, settings: TextSettings
  ) -> TextSteps:
    """Continues texts by `count` steps, or until all texts have ended."""
    rows = texts.tokens.slice_shape

    def unpack(x):
      if x is None or isinstance(x, (int, float)):
        return tf.fill(rows, 0 if x is None else x)
      return x.tensor_list[0]

    *tensors, limits, seen, history, masks, adapters, drafts = texts
    texts = Texts(
      *map(unpack, tensors),
      limits=tf.fill(rows, count) if limits is None else unpack(limits),
      seen=[*map(unpack, seen)],
      history=[*map(unpack, history)],
      masks=[*map(unpack, masks)],
      adapters=[*map(unpack, adapters)],
      drafts=[*map(unpack, drafts)],
    )
    steps = run_text_steps(
      self._make_weights(cache), count, texts, [*map(unpack, cache)], settings
    )
    pack = self._impl.LaidOutTensor
    return TextSteps(
      steps.num_steps,
      pack([steps.chosen]),
      pack([steps.logits]),
      *(
        [pack([x]) for x in y]
        for y in (steps.seen, steps.cache, steps.history, steps.drafts)
      ),
    )

  def _make_weights(self, cache):
    length = cache[0].slice_shape[-2]
    return StepWeights(
      *(self._config, length, self._table, _find_angles(self._config, length)),
      *(self._scales, self._routers, self._kernels),
    )


# --- Steps by TensorFlow's operations ----------------------------------------


def _find_cache_rows(positions, shape):
  # Returns where the key of each row's token belongs, [rows * heads] int32, in
  # keys that are reshaped from `shape` to [rows * heads * memory_length, d_kv].
  # For a multi-query cache, `heads` is 1.
  *rows, memory_length, _ = shape
  first = memory_length * tf.reshape(tf.range(math.prod(rows)), rows)
  at = tf.reshape(positions, [-1, *[1] * (len(rows) - 1)])
  return tf.reshape(first + at, [-1])


class TensorflowStep:
  """Steps on any devices: the block of model/palm.py for one position.

  With one token per row, a step spends its time on matrix products and on
  starting operations. Therefore this class implements the block again, with one
  operation (`fused`) between two products; Mesh TensorFlow would run several.

  Make the object outside of a loop over steps, because the constructor builds
  operations that all steps share. The object keeps no cache.
  """

  def __init__(self, model: DecodeModel):
    self._impl, self._config = model.placement, model.config
    self._model = model
    self._last_norm = model.make_last_norm()

  def read(
    self, tokens: LaidOut, positions: LaidOut, cache: Cache
  ) -> tuple[LaidOut, Cache]:
    """Reads one token of every row.

    Args:
      tokens: [batch], int32.
      positions: [batch], int32: position of each token, from 0.
      cache: keys and values of earlier tokens, layer after layer; changed in
        place. Rows of the cache after the first `batch` rows stay unchanged.

    Returns:
      Logits of the next token, [batch, vocab], not split along vocab; and the
      cache, which now includes these tokens.
    """
    impl, model = self._impl, self._model
    shape = cache[0].slice_shape[model.row_axis :]  # shape of a layer's keys
    num_rows = tokens.slice_shape[0]
    described = model_of(self._config)
    layers, rotaries = described.layers, described.rotaries
    tables = _find_angles(self._config, shape[-2])
    # Find each token's index in the cache and its rotation angles only once,
    # because all layers share the indices, and several layers the angles.
    at, index, *found = impl.slicewise(
      lambda p: (
        *(p, _find_cache_rows(p, [num_rows, *shape[1:]])),
        *(tf.gather(x, p) for x in tables),
      ),
      positions,
    )
    angles: dict[Rotary | None, list[LaidOut]] = {
      x: found[2 * i : 2 * i + 2] for i, x in enumerate(rotaries)
    }

    def run_one(
      model: DecodeModel,
      like: int,
      layer: int | tf.Tensor,
      carry: list[LaidOut],
    ) -> list[LaidOut]:
      x, branch, *cache = carry
      own = slice(0, 2) if model.has_stacks else slice(2 * layer, 2 * layer + 2)

      def write(keys, values, at, k, v):
        if model.has_stacks:
          at += layer * (math.prod(shape) // shape[-1])
        keys, values = write_places(keys, at, k), write_places(values, at, v)
        seen = [keys, values]
        if model.has_stacks:
          seen = [each[layer] for each in seen]
        # Only the first `num_rows` rows take this step; a slice copies nothing.
        if seen[0].shape[0] > num_rows:
          seen = [each[:num_rows] for each in seen]
        return keys, values, seen

      places = at, index, *angles.get(layers[like].rotary, ())
      block = _Block(model, layer_name(like), cache[own], places, write)
      x, branch = run_layer(layers[like], block, x, branch)
      cache[own] = block.cache
      return [x, branch, *cache]

    x = model.embed(tokens)
    if "position_embedding" in model.weights:
      x = impl.slicewise(
        lambda x, p, table: x + tf.gather(table, p),
        *(x, positions, model.weights["position_embedding"]),
      )
    zeros = impl.slicewise(tf.zeros_like, x)
    x, branch, *cache = model.for_each_layer(run_one, [x, zeros, *cache])
    _, y = _add_and_scale(model, x, [branch], self._last_norm)
    logits = model.unembed(y, is_step=True)
    for axis in split_axes(impl, [model.dims.vocab]):
      # All-gather [rows, vocab], because every device samples from all logits.
      logits = impl.allconcat(logits, axis, 1)
    finish = functools.partial(_finish, model)
    logits = impl.slicewise(finish, logits, y)
    return logits, cache

  def advance(
    self, count: tf.Tensor, texts: Texts, cache: Cache, settings: TextSettings
  ) -> TextSteps:
    """Continues texts by `count` steps, or until all texts have ended.

    Args:
      count: number of steps, [] int32. If `keeps_logits`, it must be 1.
      texts: state of the texts before the steps; each tensor is laid out. As in
        SamplingSettings, a setting may be one number for all rows.
      cache: keys and values of the tokens before the last token of each text.
      settings: vocabulary and other settings of all texts.

    Returns:
      `TextSteps` of laid-out tensors, without the logits of padding rows.
    """
    impl, end_ids = self._impl, list(settings.end_ids)
    first_cache, num_masks = 3 + len(texts.seen), len(texts.masks)

    def choose(i, logits, is_over, chosen, places, keys, *rest):
      limits, rest = rest[:3], rest[3:]
      masks, seen = rest[:num_masks], rest[num_masks:]
      for mask in masks:
        logits = forbid_tokens(logits, mask)
      token = choose_tokens(
        logits,
        seen[0] if seen else tf.constant(False),
        keys,
        places + i,
        SamplingSettings(*limits, settings.repetition_penalty),
        settings.num_tokens,
      )
      token = tf.where_v2(is_over, end_ids[0], token)
      at = tf.equal(tf.range(tf.shape(chosen)[1]), i)
      chosen = tf.where_v2(at, token[:, tf.newaxis], chosen)
      is_over |= is_among(token, end_ids)
      seen = [
        x | tf.one_hot(token, x.shape[1], True, False, dtype=tf.bool)
        for x in seen
      ]
      return (is_over, token, chosen, *seen)

    def step(i, state):
      is_over, tokens, chosen, *seen = state[:first_cache]
      positions = impl.slicewise(lambda x: x + i, texts.positions)
      logits, cache = self.read(tokens, positions, state[first_cache:])
      state = impl.slicewise(
        lambda *x: choose(i, *x),
        *(logits, is_over, chosen, texts.places, texts.keys),
        *(texts.temperature, texts.top_k, texts.top_p, *texts.masks, *seen),
      )
      return [*state, *cache], logits

    width = settings.most_steps if in_xla_computation() else count
    chosen = impl.slicewise(
      lambda x: tf.fill([x.shape[0], width], end_ids[0]), texts.tokens
    )
    state = [texts.is_over, texts.tokens, chosen, *texts.seen, *cache]
    if settings.keeps_logits:
      state, logits = step(tf.constant(0), state)
      num_steps = tf.constant(1)
    else:
      num_steps, state = repeat_step(
        impl, lambda *x: step(*x)[0], state, tf.constant(0), count
      )
      logits = None
    _, _, chosen, *seen = state[:first_cache]
    return TextSteps(num_steps, chosen, logits, seen, state[first_cache:])


class _MixedNativeStep(TensorflowStep):
  """Steps in C++, and tokens that TensorFlow's operations choose."""

  def __init__(self, model: DecodeModel):
    self._impl = model.placement
    self.read = NativeStep(model).read


def make_step(model: DecodeModel) -> NativeStep | TensorflowStep:
  """Returns a NativeStep if the weights are packed, else a TensorflowStep."""
  native = _MixedNativeStep if model.mix else NativeStep
  return (native if model.is_packed else TensorflowStep)(model)


def _add_and_scale(
  model: DecodeModel, x: LaidOut, branch: list[LaidOut], vectors: list[LaidOut]
) -> tuple[LaidOut, LaidOut]:
  form, epsilon = NORMS[model.config.norm], model.config.norm_epsilon

  def apply(x, *others):
    n = len(branch)
    return add_and_scale(x, list(others[:n]), form, epsilon, list(others[n:]))

  return model.placement.slicewise(apply, x, *branch, *vectors)


class _Block:
  """A layer's `Block` (block.py) on a mesh, for one new token per row.

  `cache` has the layer's keys and values; `mix` adds those of the new tokens.
  """

  def __init__(
    self,
    model: DecodeModel,
    layer: str,
    cache: Cache,
    places: Sequence[LaidOut],
    write: Callable[..., tuple],
  ):
    """Takes the layer's weights and cache, and the places of the tokens.

    Args:
      model: the weights, of this layer or of all layers.
      layer: prefix of the names of the layer's weights, from `layer_name`.
      cache: keys and values of earlier tokens.
      places: position of each token, index of each token in the cache, and the
        angles of rotary embedding, if any.
      write: adds keys and values to the cache; returns the cache, and its part
        to which the tokens attend.
    """
    self.cache = cache
    self._impl, self._model, self._layer = model.placement, model, layer
    self._places, self._write = places, write

  def add_and_norm(
    self, x: LaidOut, branch: list[LaidOut], norm: str
  ) -> tuple[LaidOut, LaidOut]:
    vectors = self._model.norm_vectors(f"{self._layer}/{norm}")
    return _add_and_scale(self._model, x, branch, vectors)

  def mix(self, y: LaidOut, read: Read) -> dict[Projection, LaidOut]:
    columns = self._model.columns(read, threads=0)
    vectors = self._model.project_vectors(self._layer, read)
    extras = [
      x
      for branch in read.joined
      if isinstance(branch.mixer, Attention)
      for x in self._model.score_extras(self._layer, branch.mixer)
    ]
    given = self.cache, self._places, vectors, extras

    def apply(wide, *others):
      others = iter(others)
      cache, (positions, at, *angles), vectors, extras = (
        list(itertools.islice(others, len(some))) for some in given
      )

      def attend(q, k, v, mixer):
        *cache[:], seen = self._write(*cache, at, k, v)
        where = positions[:, tf.newaxis]
        y = attend_to_cache(q[:, tf.newaxis], *seen, where, mixer, extras)
        return y[:, 0]

      parts = columns.split(wide, positions.shape, angles, vectors)
      mixed = mix_products(read, parts, attend)
      return (*cache, *mixed)

    wide = self._model.project_in(y, self._layer, read, is_step=True)
    found = self._impl.slicewise(apply, wide, *itertools.chain(*given))
    n = len(self.cache)
    self.cache = list(found[:n])
    outputs = [branch.output for branch in read.joined]
    return dict(zip(outputs, found[n:], strict=True))

  def run_experts(self, y: LaidOut, branch: Branch) -> LaidOut:
    return self._model.run_experts(y, self._layer, branch)

  def project_out(
    self, branches: Mapping[Projection, LaidOut], others: Sequence[LaidOut]
  ) -> LaidOut:
    y = self._model.project_out(self._layer, branches, others, is_step=True)
    for bias in self._model.output_biases(self._layer, branches):
      y = self._model.add_bias(y, bias)
    return y
