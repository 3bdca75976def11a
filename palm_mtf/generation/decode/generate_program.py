# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Graph that continues texts: prefill once, then a loop inside the graph."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.accounting.architecture import parse_name
from palm_mtf.config import DecodeConfig, MeshLayout, PalmConfig
from palm_mtf.generation.decode.batch_sharding import join_rows, split_rows
from palm_mtf.generation.decode.forward import prefill
from palm_mtf.generation.decode.native_decoder import make_decoder
from palm_mtf.generation.decode.strategies import (
  Beams,
  PromptBatch,
  Sampling,
  repeat,
)
from palm_mtf.generation.decode.weights import (
  DecodeWeights,
  LaidOut,
  make_weights,
)
from palm_mtf.mesh.cpu_gpu import CpuGpuPlacement, local_devices
from palm_mtf.mesh.placement import lower
from palm_mtf.mesh.slices import Slice
from palm_mtf.model.dims import model_dims
from palm_mtf.model.weights import palm_variables
from palm_mtf.native.decoding import Texts

# `start` reads the prompts of a batch; `advance` reads their last tokens once
# more and goes on, token by token in one tf.while_loop or one operation of
# `native`, to a given length or until every row has ended. In between the state
# lies in variables, so that tokens can be shown before the last. Rows of one
# prompt, NUM_SAMPLES or NUM_BEAMS of them, are neighbours.


@dataclasses.dataclass(frozen=True)
class LayerWeights:
  """Weights of one layer, or of what is outside of all.

  Attributes:
    slices: slices of a checkpoint's variables, by name.
    prepare: makes the weights of the slices, and frees these.
  """

  slices: Mapping[str, Sequence[Slice]]
  prepare: tf.Operation


@dataclasses.dataclass(frozen=True)
class DecodeModel:
  """Weights of one model on one mesh, to be loaded before anything reads them.

  Attributes:
    config: the architecture.
    placement: devices and layout.
    weights: weights of prefill, scoring and steps.
    layers: how `weights` are made, layer by layer.
  """

  config: PalmConfig
  placement: CpuGpuPlacement
  weights: DecodeWeights
  layers: Sequence[LayerWeights]


def build_decode_model(
  config: PalmConfig, mesh_layout: MeshLayout, weight_dtype: str
) -> DecodeModel:
  """Makes variables and weights in the current tf.Graph.

  Args:
    config: the architecture.
    mesh_layout: devices and layout rules, checked against `config`.
    weight_dtype: WEIGHT_DTYPE.
  """
  mesh = mtf.Mesh(mtf.Graph(), "pod")
  dims = model_dims(config, 1, mesh_layout)
  # Each device holds all of d_model, whatever the layout: to gather weights for
  # each token would cost more than the rest of a step.
  dims = dataclasses.replace(
    dims, d_model_stored=dims.d_model, d_model_residual=dims.d_model
  )
  palm_variables(mesh, config, dims)
  placement = local_devices(mesh_layout.num_devices).placement(mesh_layout, 0)
  (slices,) = lower({mesh: placement}, {}).slices
  variables = {
    name: [part.variable for part in parts] for name, parts in slices.items()
  }
  weights = make_weights(placement, config, dims, variables, weight_dtype)
  by_layer = collections.defaultdict(dict)
  for name, parts in slices.items():
    by_layer[parse_name(name).layer][name] = parts
  return DecodeModel(
    config=config,
    placement=placement,
    weights=weights,
    layers=[
      LayerWeights(some, _freed(some, behind=weights.initialize[layer]))
      for layer, some in by_layer.items()
    ],
  )


def _freed(
  slices: Mapping[str, Sequence[Slice]], behind: tf.Operation
) -> tf.Operation:
  """Returns the operation that frees variables once another has read them."""
  with tf.control_dependencies([behind]):
    return tf.group(
      [
        tf.raw_ops.DestroyResourceOp(resource=each.variable.handle)
        for parts in slices.values()
        for each in parts
      ]
    )


@dataclasses.dataclass(frozen=True)
class DecodeProgram:
  """Continues a batch of prompts.

  Attributes:
    prompts: feed [prompts, prompt_tokens], int32, each from the left.
    lengths: feed [prompts], int32: tokens of each prompt.
    keys: feed [prompts, rows, 2], int32: keys of each row's draws.
    start: prefills.
    limit: feed [], int32: number of tokens that `advance` goes on to.
    advance: samples tokens.
    tokens: [prompts, rows, max_tokens], int32: [eod] behind the end. Of beam
      search they are there after its last step, best first.
    num_done: [], int32: tokens that each row has.
    is_over: [prompts, rows], bool: whether a row, or a search, has ended.
    scores: [prompts, beams], float32, of beam search; else None.
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
  """Builds the program for batches of one size in the current tf.Graph.

  Args:
    model: result of `build_decode_model`.
    decode: settings of sampling or beam search.
    sizes: sizes of the batch.
  """
  prompts = tf.placeholder(
    tf.int32, [sizes.num_prompts, sizes.prompt_tokens], "prompts"
  )
  lengths = tf.placeholder(tf.int32, [sizes.num_prompts], "lengths")
  rows = decode.rows_per_prompt
  keys = tf.placeholder(tf.int32, [sizes.num_prompts, rows, 2], "keys")
  limit = tf.placeholder(tf.int32, [], "limit")
  loop = _Loop(model, decode, sizes)
  start = loop.start(prompts, lengths, keys)
  tokens, is_over, scores = loop.results()
  by_prompt = [sizes.num_prompts, rows]
  return DecodeProgram(
    prompts=prompts,
    lengths=lengths,
    keys=keys,
    start=start,
    limit=limit,
    advance=loop.advance(limit),
    tokens=tf.reshape(tokens, [*by_prompt, sizes.max_tokens]),
    num_done=loop.place.read_value(),
    is_over=tf.reshape(is_over, by_prompt),
    scores=None if scores is None else tf.reshape(scores, by_prompt),
  )


class _Loop:
  """State of one program, in variables, and the operations that change it."""

  def __init__(
    self, model: DecodeModel, decode: DecodeConfig, sizes: PromptBatch
  ):
    self._impl = model.placement
    self._weights, self._config = model.weights, model.config
    self._decoder = make_decoder(model.weights)
    self._decode, self._sizes = decode, sizes
    self._rows = decode.rows_per_prompt
    self._chooser = (Beams if decode.num_beams > 1 else Sampling)(decode, sizes)
    self.place = _variable(tf.constant(0), "place")
    # Of every device: lengths and keys; and tokens, the strategy's state and
    # the cache, which steps change. Both are set by `start`.
    self._fixed: list[LaidOut] = []
    self._state: list[LaidOut] = []
    self._num_state = 0  # tensors of the strategy

  def start(
    self, prompts: tf.Tensor, lengths: tf.Tensor, keys: tf.Tensor
  ) -> tf.Operation:
    """Builds prefill; makes the variables of the state."""
    length, vocab_size = self._sizes.memory_length, self._config.vocab_size
    lengths, keys = (split_rows(self._impl, x) for x in (lengths, keys))
    cache = prefill(self._weights, prompts, lengths, length)

    def first_state(prompts, lengths):
      last = tf.gather(prompts, lengths - 1, batch_dims=1)
      state = self._chooser.first_state(prompts, lengths, vocab_size)
      return repeat(last, self._rows), *state

    state = self._impl.slicewise(
      first_state, split_rows(self._impl, prompts), lengths
    )
    self._num_state = len(state) - 1
    # One prefill serves all rows of a prompt: its cache is repeated for them.
    lengths, *cache = (
      self._impl.slicewise(lambda x: repeat(x, self._rows), x)
      for x in (lengths, *cache)
    )
    keys = self._impl.slicewise(lambda x: tf.reshape(x, [-1, 2]), keys)
    self._fixed = [self._kept(x) for x in (lengths, keys)]
    self._state = [self._kept(x) for x in (*state, *cache)]
    return tf.group(
      self.place.assign(0),
      assign_all(self._fixed, [lengths, keys]),
      assign_all(self._state, [*state, *cache]),
    )

  def advance(self, limit: tf.Tensor) -> tf.Operation:
    """Builds the loop over steps, to `limit` tokens or the end of all rows."""
    place = self.place.read_value()
    lengths, keys = (self._read(x) for x in self._fixed)
    state = [self._read(x) for x in self._state]
    if self._weights.is_packed and isinstance(self._chooser, Sampling):
      place, state = self._text_steps(limit, place, lengths, keys, state)
    else:
      place, state = self._loop(limit, place, lengths, keys, state)
    return tf.group(self.place.assign(place), assign_all(self._state, state))

  def _text_steps(self, limit, place, lengths, keys, state):
    # Packed weights lie on one device.
    count = 1 + self._num_state  # the last token's too
    (lengths,), (keys,) = lengths.tensor_list, keys.tensor_list
    rows, cache = [x.tensor_list[0] for x in state[:count]], state[count:]
    tokens, texts, is_over, *seen = rows
    decode, eod_id = self._decode, self._sizes.eod_id
    steps = self._decoder.text_steps(
      limit - place,
      Texts(
        tokens,
        positions=lengths + place - 1,
        places=tf.fill(lengths.shape, place),
        is_over=is_over,
        keys=keys,
        temperature=tf.fill(lengths.shape, decode.temperature),
        top_k=tf.fill(lengths.shape, decode.top_k or 0),
        top_p=tf.fill(lengths.shape, decode.top_p),
        seen=seen,
      ),
      cache,
      num_tokens=self._sizes.num_tokens,
      eod_id=eod_id,
      repetition_penalty=decode.repetition_penalty,
    )
    chosen, after = steps.chosen, place + tf.shape(steps.chosen)[1]
    tokens = tf.concat([tokens[:, tf.newaxis], chosen], 1)[:, -1]
    whole = tf.concat([texts[:, :place], chosen, texts[:, after:]], 1)
    is_over |= tf.reduce_any(tf.equal(chosen, eod_id), 1)
    state = [tokens, tf.ensure_shape(whole, texts.shape), is_over, *steps.seen]
    return after, [
      *(self._impl.LaidOutTensor([x]) for x in state),
      *steps.cache,
    ]

  def _loop(self, limit, place, lengths, keys, state):
    def is_going_on(place, *flat):
      _, is_over, _ = self._results(self._unflatten(flat))
      # Devices hold different rows, and every one takes part in all-reduces:
      # none ends before all have.
      over = tf.stack([tf.reduce_all(x) for x in is_over.tensor_list])
      return (place < limit) & ~tf.reduce_all(over)

    def step(place, *flat):
      # The loop carries the cache as plain tensors: each step overwrites the
      # keys and values of the one before in place.
      token, *state = self._unflatten(flat)
      state, cache = state[: self._num_state], state[self._num_state :]
      position = self._impl.slicewise(lambda n: n + place - 1, lengths)
      logits, cache = self._decoder.step(token, position, cache)
      token, state, cache = self._choose(logits, place, keys, state, cache)
      return [place + 1, *self._flatten([token, *state, *cache])]

    place, *state = tf.while_loop(
      is_going_on, step, [place, *self._flatten(state)]
    )
    return place, self._unflatten(state)

  def results(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None]:
    """Returns tokens, whether each row has ended, and scores, of all rows."""
    state = [self._read(x) for x in self._state]
    return tuple(
      None if x is None else join_rows(self._impl, x)
      for x in self._results(state)
    )

  def _results(self, state: Sequence[LaidOut]) -> list[LaidOut | None]:
    state = state[1 : 1 + self._num_state]  # neither last token nor cache
    parts = zip(*(x.tensor_list for x in state), strict=True)
    results = [self._chooser.results(list(part)) for part in parts]
    return [
      None if each[0] is None else self._impl.LaidOutTensor(list(each))
      for each in zip(*results, strict=True)
    ]

  def _choose(self, logits, place, keys, state, cache):
    # A beam search has its rows in another order then; the cache follows.
    token, *after = self._impl.slicewise(
      lambda logits, *x: self._chooser.choose(logits, place, *x),
      logits,
      keys,
      *state,
    )
    if len(after) > len(state):
      rows = after.pop()
      cache = [self._impl.slicewise(tf.gather, x, rows) for x in cache]
    return token, after, cache

  def _kept(self, x: LaidOut) -> LaidOut:
    return self._impl.slicewise(
      lambda x: _variable(tf.zeros(x.shape, x.dtype), "state"), x
    )

  def _read(self, variables: LaidOut) -> LaidOut:
    return self._impl.slicewise(lambda v: v.read_value(), variables)

  def _flatten(self, xs: Sequence[LaidOut]) -> list[tf.Tensor]:
    return [part for x in xs for part in x.tensor_list]

  def _unflatten(self, flat: Sequence[tf.Tensor]) -> list[LaidOut]:
    size = self._impl.size
    return [
      self._impl.LaidOutTensor(list(flat[i : i + size]))
      for i in range(0, len(flat), size)
    ]


def _variable(value: tf.Tensor, name: str) -> tf.Variable:
  return tf.Variable(value, trainable=False, use_resource=True, name=name)


def assign_all(
  variables: Sequence[LaidOut], values: Sequence[LaidOut]
) -> tf.Operation:
  """Assigns values to variables, on every device."""
  return tf.group(
    [
      variable.assign(value, read_value=False)
      for pair in zip(variables, values, strict=True)
      for variable, value in zip(*(x.tensor_list for x in pair), strict=True)
    ]
  )
