# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The decoding step: one more token per row, with cached keys and values.

  keys, values   [batch, memory_length, d_kv]          multi-query
                 [batch, heads, memory_length, d_kv]   multi-head

A multi-query cache has 2 num_layers d_kv numbers per row and position. Rows may
be at different positions. The protocol `Step` has two implementations, in C++
(native/decoding.py) and by TensorFlow's operations.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from palm_mtf._tf import tf
from palm_mtf.accounting.architecture import layer_name
from palm_mtf.generation.decode.rows import Cache, LaidOut
from palm_mtf.generation.decode.sampling import SamplingSettings, choose_tokens
from palm_mtf.generation.decode.weights import DecodeModel, Products
from palm_mtf.mesh.cpu_gpu import CpuGpuPlacement
from palm_mtf.model.attention import visible_softmax
from palm_mtf.model.layers import (
  local_embedding,
  normalize,
  sines_and_cosines,
)
from palm_mtf.model.projection import JoinedColumns
from palm_mtf.native.decoding import (
  StepWeights,
  Texts,
  TextSettings,
  TextSteps,
  run_decode_step,
  run_text_steps,
)
from palm_mtf.ops.matmul import matmul
from palm_mtf.ops.slicewise import slice_offset, split_axes
from palm_mtf.ops.xla import fused


class Step(Protocol):
  """Builds the operations of decoding steps; keeps no state.

  Make a `Step` outside of a loop over steps, because its constructor builds
  operations that all steps share.
  """

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
      Logits of the next token, [batch, vocab], unsplit along vocab; and the
      cache, which now includes these tokens.
    """

  def advance(
    self,
    count: tf.Tensor,
    texts: Texts,
    cache: Cache,
    settings: TextSettings,
  ) -> TextSteps:
    """Continues texts by `count` steps, or until all texts have ended.

    Args:
      count: number of steps, [] int32. If `keeps_logits`, it must be 1.
      texts: state of the texts before the steps; each tensor is laid out. As in
        SamplingSettings, a setting may be one number for all rows.
      cache: see `read`.
      settings: vocabulary and other settings of all texts.

    Returns:
      `TextSteps` of laid-out tensors. Logits of the embedding's padding rows
      are left out.
    """


def make_step(model: DecodeModel) -> Step:
  """Returns the `Step` for the weights of `model`, packed or not."""
  return (NativeStep if model.is_packed else TensorflowStep)(model)


def repeat_step(
  placement: CpuGpuPlacement,
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
  size = placement.size

  # The loop carries the cache as plain tensors, so that each step can write its
  # keys and values into the cache in place.
  def flatten(state):
    return [part for x in state for part in x.tensor_list]

  def unflatten(flat):
    return [
      placement.LaidOutTensor(list(flat[i : i + size]))
      for i in range(0, len(flat), size)
    ]

  def has_more(place, *flat):
    # Every device takes part in all-reduces, so no device may leave the loop
    # before all rows on all devices have ended.
    over = tf.stack([tf.reduce_all(x) for x in flat[:size]])
    return (place < limit) & ~tf.reduce_all(over)

  place, *flat = tf.while_loop(
    has_more,
    lambda place, *flat: [place + 1, *flatten(step(place, unflatten(flat)))],
    [first, *flatten(state)],
  )
  return place, unflatten(flat)


# --- Steps in C++ ------------------------------------------------------------


class NativeStep:
  """`Step` for packed weights on one CPU: one C++ operation runs all steps."""

  def __init__(self, model: DecodeModel):
    self._impl, self._config = model.placement, model.config
    norms = ["norm", "mlp_norm"][: 1 + (self._config.block == "serial")]
    scales = [
      model.scales[f"{layer_name(layer)}/{norm}/scale"]
      for layer in range(self._config.num_layers)
      for norm in norms
    ]
    scales.append(model.make_last_scale())
    # List scales and kernels in the order in which a step uses them, which is
    # also the order of `model.kernels`.
    kernels = [x.kernel for x in model.kernels.values()]
    (self._table,) = model.table.tensor_list
    self._scales = [x.tensor_list[0] for x in scales]
    self._kernels = [
      x.tensor_list[0].weights for x in (*kernels, model.to_logits)
    ]

  def read(
    self, tokens: LaidOut, positions: LaidOut, cache: Cache
  ) -> tuple[LaidOut, Cache]:
    """Reads one token of every row; see `Step`."""
    weights = self._make_weights(cache)

    def read(tokens, positions, *cache):
      logits, after = run_decode_step(weights, tokens, positions, cache)
      return (self._drop_padding(logits), *after)

    logits, *after = self._impl.slicewise(read, tokens, positions, *cache)
    return logits, after

  def advance(
    self,
    count: tf.Tensor,
    texts: Texts,
    cache: Cache,
    settings: TextSettings,
  ) -> TextSteps:
    """Continues texts; see `Step`."""
    rows = texts.tokens.slice_shape

    def unpack(x):
      if isinstance(x, LaidOut):
        return x.tensor_list[0]
      return tf.fill(rows, 0 if x is None else x)

    *tensors, seen = texts
    steps = run_text_steps(
      self._make_weights(cache),
      count,
      Texts(*map(unpack, tensors), seen=[*map(unpack, seen)]),
      [*map(unpack, cache)],
      settings,
    )
    pack = self._impl.LaidOutTensor
    return TextSteps(
      pack([steps.chosen]),
      pack([self._drop_padding(steps.logits)]),
      [pack([x]) for x in steps.seen],
      [pack([x]) for x in steps.cache],
    )

  def _make_weights(self, cache):
    tables = sines_and_cosines(cache[0].slice_shape[-2], self._config.d_kv)
    return StepWeights(
      config=self._config,
      tables=(self._table, *tables),
      scales=self._scales,
      kernels=self._kernels,
    )

  def _drop_padding(self, logits):
    return logits[:, : self._config.vocab_size]


# --- Steps by TensorFlow's operations ----------------------------------------


# With one token per row, a step spends its time on matrix products and on
# starting the operations between them. Therefore XLA compiles (`fused`) each
# function between products into one operation, which passes over memory once.


@fused
def _add_and_norm(x, scale, kind, *branch):
  # Returns x + branch (if there is a branch), [rows, d_model], and the scaled
  # norm of this sum.
  x = sum(branch, x)
  return x, tf.cast(normalize(x, kind) * scale, x.dtype)


@fused
def _softmax(scores, positions, scale):
  at = tf.reshape(positions, [-1, *[1] * (scores.shape.rank - 1)])
  visible = tf.range(scores.shape[-1]) <= at
  return visible_softmax(scores, visible, scale)


def _attend(q, keys, values, positions):
  # Attends from one token per row, with the query q [rows, heads, d_kv], to
  # this token and all earlier tokens; returns [rows, heads * d_kv].
  scale = q.shape[-1] ** -0.5
  # In multi-query attention all heads share the keys, so the heads of q are the
  # rows of one matrix. In multi-head attention each head has its own product.
  if keys.shape.rank == 4:
    q = q[:, :, tf.newaxis]
  weights = _softmax(matmul(q, keys, transpose_b=True), positions, scale)
  return tf.reshape(matmul(weights, values), [q.shape[0], -1])


def _find_cache_rows(positions, shape):
  # Returns the index of each row's token, [rows * heads] int32, in a cache that
  # is reshaped from `shape` to [rows * heads * memory_length, d_kv]. For a
  # multi-query cache, `heads` is 1.
  *rows, memory_length, _ = shape
  first = memory_length * tf.reshape(tf.range(math.prod(rows)), rows)
  at = tf.reshape(positions, [-1, *[1] * (len(rows) - 1)])
  return tf.reshape(first + at, [-1])


def _write(cache, at, x):
  # Writes x [rows, (heads,) d_kv], the keys or values of one token per row,
  # into a cache, at the indices `at`.
  d_kv = cache.shape[-1]
  # TensorFlow's scatter would copy all positions, which costs more than the
  # rest of a step. Writing in place is safe, because nothing else reads the
  # previous step's cache.
  flat = tf.raw_ops.InplaceUpdate(
    x=tf.reshape(cache, [-1, d_kv]), i=at, v=tf.reshape(x, [-1, d_kv])
  )
  return tf.reshape(flat, cache.shape)


class TensorflowStep:
  """`Step` on any devices: the block of model/palm.py for one position.

  This class implements the block again for speed: with one position, the time
  grows with the number of operations, and Mesh TensorFlow would run several
  operations where this class runs one.
  """

  def __init__(self, model: DecodeModel):
    self._impl, self._config = model.placement, model.config
    self._model = model
    self._products = Products(model, packed=True)
    self._last_scale = model.make_last_scale()

  def read(
    self, tokens: LaidOut, positions: LaidOut, cache: Cache
  ) -> tuple[LaidOut, Cache]:
    """Reads one token of every row; see `Step`."""
    impl, shape = self._impl, cache[0].slice_shape
    num_rows = tokens.slice_shape[0]
    shape = [num_rows, *shape[1:]]
    tables = sines_and_cosines(shape[-2], self._config.d_kv)
    # Find each token's index in the cache and its rotation angles only once,
    # because they are the same in all layers.
    places = impl.slicewise(
      lambda p: (
        *(p, _find_cache_rows(p, shape)),
        *(tf.gather(x, p) for x in tables),
      ),
      positions,
    )
    after: Cache = []

    def attend(layer: int, y: LaidOut, names: list[str]) -> list[LaidOut]:
      columns = self._make_columns(names, is_gated=len(names) == 5)

      def read(keys, values, positions, at, sin, cos, wide):
        q, k, v, *hidden = columns.read(wide, sin.shape[:1], (sin, cos))
        keys, values = _write(keys, at, k), _write(values, at, v)
        # A slice of the first rows is a view, so nothing is copied.
        seen = [
          x if x.shape[0] == num_rows else x[:num_rows] for x in (keys, values)
        ]
        return (keys, values, _attend(q, *seen, positions), *hidden)

      wide = self._products.project_in(y, names)
      keys, values, *branches = impl.slicewise(
        read, *cache[2 * layer : 2 * layer + 2], *places, wide
      )
      after.extend([keys, values])
      return branches

    x, y = self._add_and_norm(self._embed(tokens), {}, f"{layer_name(0)}/norm")
    for layer in range(self._config.num_layers):
      x, y = self._apply_block(layer, x, y, attend)
    return self._products.compute_logits(y), after

  def advance(
    self,
    count: tf.Tensor,
    texts: Texts,
    cache: Cache,
    settings: TextSettings,
  ) -> TextSteps:
    """Continues texts; see `Step`."""
    impl, eod_id = self._impl, settings.eod_id
    first_cache = 3 + len(texts.seen)

    def choose(i, logits, is_over, chosen, places, keys, *rest):
      *limits, seen = *rest[:3], rest[3:]
      token = choose_tokens(
        logits,
        seen[0] if seen else tf.constant(False),
        keys,
        places + i,
        SamplingSettings(*limits, settings.repetition_penalty),
        settings.num_tokens,
      )
      token = tf.where_v2(is_over, eod_id, token)
      at = tf.equal(tf.range(tf.shape(chosen)[1]), i)
      chosen = tf.where_v2(at, token[:, tf.newaxis], chosen)
      is_over |= tf.equal(token, eod_id)
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
        *(texts.temperature, texts.top_k, texts.top_p, *seen),
      )
      return [*state, *cache], logits

    chosen = impl.slicewise(
      lambda x: tf.fill([x.shape[0], count], eod_id), texts.tokens
    )
    state = [texts.is_over, texts.tokens, chosen, *texts.seen, *cache]
    if settings.keeps_logits:
      state, logits = step(tf.constant(0), state)
    else:
      num_steps, state = repeat_step(
        impl, lambda *x: step(*x)[0], state, tf.constant(0), count
      )
      state[2] = impl.slicewise(lambda x: x[:, :num_steps], state[2])
      logits = None
    _, _, chosen, *seen = state[:first_cache]
    return TextSteps(chosen, logits, seen, state[first_cache:])

  def _apply_block(
    self,
    layer: int,
    x: LaidOut,
    y: LaidOut,
    attend: Callable[..., list[LaidOut]],
  ) -> tuple[LaidOut, LaidOut]:
    # Maps the residual stream x and its norm y, [rows, d_model] each, to x and
    # y after the block. One operation adds the branches to x and computes the
    # next norm.
    name = layer_name(layer)
    qkv = [f"{name}/attention/{part}" for part in "qkv"]
    gates = [f"{name}/mlp/wi_gate", f"{name}/mlp/wi"]
    is_last = layer == self._config.num_layers - 1
    following = "final_norm" if is_last else f"{layer_name(layer + 1)}/norm"
    if self._config.block == "parallel":
      heads, hidden = attend(layer, y, [*qkv, *gates])
      branches = {f"{name}/attention/o": heads, f"{name}/mlp/wo": hidden}
      return self._add_and_norm(x, branches, following)
    (heads,) = attend(layer, y, qkv)
    branches = {f"{name}/attention/o": heads}
    x, y = self._add_and_norm(x, branches, f"{name}/mlp_norm")
    columns = self._make_columns(gates, is_gated=True)
    (hidden,) = self._impl.slicewise(
      lambda wide: columns.read(wide, x.slice_shape[:1], ()),
      self._products.project_in(y, gates),
    )
    return self._add_and_norm(x, {f"{name}/mlp/wo": hidden}, following)

  def _make_columns(self, names: list[str], *, is_gated: bool) -> JoinedColumns:
    return JoinedColumns(self._products.shapes(names), is_gated, threads=0)

  def _embed(self, tokens: LaidOut) -> LaidOut:
    vocab = self._model.dims.vocab
    x = self._impl.slicewise(
      local_embedding,
      slice_offset(self._impl, vocab),
      self._model.table,
      tokens,
    )
    # If a layout splits vocab, all-reduce [rows, d_model]: the slice of the
    # table that has a token's row gives the row, and the other slices zeros.
    return self._impl.allreduce(x, split_axes(self._impl, [vocab]), "SUM")

  def _add_and_norm(
    self, x: LaidOut, branches: dict[str, LaidOut], name: str
  ) -> tuple[LaidOut, LaidOut]:
    # `branches` is {name of a kernel: input of the kernel, [rows, inputs]};
    # `name` is the norm to apply to the sum.
    is_last = name == "final_norm"
    kind = self._config.norm
    return self._impl.slicewise(
      lambda x, scale, *branch: _add_and_norm(x, scale, kind, *branch),
      x,
      self._last_scale if is_last else self._model.scales[f"{name}/scale"],
      *([self._products.project_out(branches)] if branches else []),
    )
