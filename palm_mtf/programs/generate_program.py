# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The graph that continues texts: prefill once, then a loop inside the graph.

`start` reads the prompts of a batch and chooses the first token of every row;
`advance` goes on, token by token in one tf.while_loop, to a given length or
until every row has ended. In between the state lies in variables, so that what
is there may be shown. Rows of one prompt are neighbours: NUM_SAMPLES or
NUM_BEAMS of them. How tokens are chosen is in decode/strategies.py.
"""

import dataclasses
from collections.abc import Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.config.decode import DecodeConfig
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import PalmConfig
from palm_mtf.decode.batch_sharding import join_rows, split_rows
from palm_mtf.decode.decoder import Cache, Decoder, LaidOut
from palm_mtf.decode.strategies import Beams, PromptBatch, Sampling, repeat
from palm_mtf.decode.weights import checkpoint_variables, make_weights
from palm_mtf.mesh.host.devices import local_devices
from palm_mtf.mesh.host.placement import HostPlacement
from palm_mtf.mesh.lowering import lower
from palm_mtf.mesh.slices import Slice
from palm_mtf.model.dims import model_dims


@dataclasses.dataclass(frozen=True)
class DecodeModel:
  """The weights of one model on one mesh, ready to decode.

  Attributes:
    config: the architecture.
    placement: the devices and the layout.
    decoder: builds prefill and steps.
    slices: slices of every variable of a checkpoint, by its name: restore them,
      and run `prepare`.
    prepare: makes of them what decoding reads. They may not change afterwards.
    release: frees them; they are not needed any more.
  """

  config: PalmConfig
  placement: HostPlacement
  decoder: Decoder
  slices: dict[str, list[Slice]]
  prepare: tf.Operation
  release: tf.Operation


def build_decode_model(
  config: PalmConfig, mesh_layout: MeshLayout, weight_dtype: str
) -> DecodeModel:
  """Makes the variables in the current tf.Graph.

  Args:
    config: the architecture.
    mesh_layout: devices and layout rules, checked against `config`.
    weight_dtype: WEIGHT_DTYPE.
  """
  mesh = mtf.Mesh(mtf.Graph(), "pod")
  dims = model_dims(config, 1, mesh_layout)
  checkpoint_variables(mesh, config, dims)
  placement = local_devices(mesh_layout.num_devices).placement(mesh_layout, 0)
  (slices,) = lower({mesh: placement}, {}).slices
  variables = {
    name: [part.variable for part in parts] for name, parts in slices.items()
  }
  weights = make_weights(placement, config, dims, variables, weight_dtype)
  return DecodeModel(
    config=config,
    placement=placement,
    decoder=Decoder(placement, config, dims, weights),
    slices=slices,
    prepare=weights.initialize,
    release=tf.group(
      [
        tf.raw_ops.DestroyResourceOp(resource=each.handle)
        for parts in variables.values()
        for each in parts
      ]
    ),
  )


@dataclasses.dataclass(frozen=True)
class DecodeProgram:
  """Continues a batch of prompts.

  Attributes:
    prompts: feed [prompts, prompt_tokens], int32, each from the left.
    lengths: feed [prompts], int32: how many of them are of each prompt.
    keys: feed [prompts, samples, 2], int32: of the draws of each row.
    start: reads what is fed and chooses the first token.
    limit: feed [], int32: how many tokens `advance` goes on to.
    advance: chooses more tokens.
    tokens: [prompts, rows a prompt, max_tokens], int32: [eod] behind the end.
      Beam search has them after its last step, best first.
    num_done: [], int32: tokens that each row has.
    is_over: [prompts, rows a prompt], bool: whether a row has ended; of a beam
      search, whether the search has.
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
  """Builds the program for batches of some sizes in the current tf.Graph.

  Args:
    model: model that `build_decode_model` returned.
    decode: how tokens are chosen.
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
  """The state of one program, in variables, and what changes it."""

  def __init__(
    self, model: DecodeModel, decode: DecodeConfig, sizes: PromptBatch
  ):
    self._impl = model.placement
    self._decoder = model.decoder
    self._vocab_size = model.config.vocab_size
    self._sizes = sizes
    self._rows = decode.rows_per_prompt
    self._chooser = (Beams if decode.num_beams > 1 else Sampling)(decode, sizes)
    self.place = _variable(tf.constant(0), "place")
    # Of every device: what stays, and what a step changes. Set by `start`.
    self._fixed: list[LaidOut] = []
    self._state: list[LaidOut] = []

  def start(
    self, prompts: tf.Tensor, lengths: tf.Tensor, keys: tf.Tensor
  ) -> tf.Operation:
    """Builds prefill and first token; makes the variables of the state."""
    prompts, lengths, keys = (
      split_rows(self._impl, x) for x in (prompts, lengths, keys)
    )
    y, cache = self._decoder.prefill(prompts, self._sizes.memory_length)
    last = self._impl.slicewise(
      lambda y, n: tf.gather(y, n - 1, batch_dims=1), y, lengths
    )
    state = self._impl.slicewise(
      lambda *x: tuple(self._chooser.first_state(*x, self._vocab_size)),
      prompts,
      lengths,
    )
    logits, lengths, *cached = (
      self._impl.slicewise(lambda x: repeat(x, self._rows), x)
      for x in (
        self._decoder.logits(last),
        lengths,
        *cache.keys,
        *cache.values,
      )
    )
    keys = self._impl.slicewise(lambda x: tf.reshape(x, [-1, 2]), keys)
    token, state, cached = self._choose(
      logits, tf.constant(0), keys, state, cached
    )
    self._fixed = [self._kept(x) for x in (lengths, keys)]
    self._state = [self._kept(x) for x in (token, *state, *cached)]
    return tf.group(
      self.place.assign(1),
      self._assign(self._fixed, [lengths, keys]),
      self._assign(self._state, [token, *state, *cached]),
    )

  def advance(self, limit: tf.Tensor) -> tf.Operation:
    """Builds the loop that goes on until rows have `limit` tokens or ended."""
    lengths, keys = (self._read(x) for x in self._fixed)
    first = [self._read(x) for x in self._state]
    num_state = len(first) - 2 * self._num_layers - 1

    def is_going_on(place, *flat):
      _, is_over, _ = self._results(self._unflatten(flat)[1 : 1 + num_state])
      # No device has ended before all have.
      over = tf.stack([tf.reduce_all(x) for x in is_over.tensor_list])
      return (place < limit) & ~tf.reduce_all(over)

    def step(place, *flat):
      token, *rest = self._unflatten(flat)
      state, cached = rest[:num_state], rest[num_state:]
      position = self._impl.slicewise(lambda n: n + place - 1, lengths)
      layers = self._num_layers
      logits, cache = self._decoder.step(
        token, position, Cache(cached[:layers], cached[layers:])
      )
      token, state, cached = self._choose(
        logits, place, keys, state, [*cache.keys, *cache.values]
      )
      return [place + 1, *self._flatten([token, *state, *cached])]

    place, *last = tf.while_loop(
      is_going_on, step, [self.place.read_value(), *self._flatten(first)]
    )
    return tf.group(
      self.place.assign(place),
      self._assign(self._state, self._unflatten(last)),
    )

  def results(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None]:
    """Returns tokens, whether rows have ended and scores, of all rows."""
    num_state = len(self._state) - 2 * self._num_layers - 1
    state = [self._read(x) for x in self._state[1 : 1 + num_state]]
    return tuple(
      None if x is None else join_rows(self._impl, x)
      for x in self._results(state)
    )

  @property
  def _num_layers(self) -> int:
    return self._decoder.num_layers

  def _results(self, state: Sequence[LaidOut]) -> list[LaidOut | None]:
    parts = zip(*(x.tensor_list for x in state), strict=True)
    results = [self._chooser.results(list(part)) for part in parts]
    return [
      None if each[0] is None else self._impl.LaidOutTensor(list(each))
      for each in zip(*results, strict=True)
    ]

  def _choose(self, logits, place, keys, state, cached):
    """Returns tokens, state and cache, its rows in the tokens' order."""
    token, *after = self._impl.slicewise(
      lambda logits, *x: self._chooser.choose(logits, place, *x),
      logits,
      keys,
      *state,
    )
    if len(after) > len(state):
      rows = after.pop()
      cached = [self._impl.slicewise(tf.gather, x, rows) for x in cached]
    return token, after, cached

  def _kept(self, x: LaidOut) -> LaidOut:
    return self._impl.slicewise(
      lambda x: _variable(tf.zeros(x.shape, x.dtype), "state"), x
    )

  def _read(self, variables: LaidOut) -> LaidOut:
    return self._impl.slicewise(lambda v: v.read_value(), variables)

  def _assign(
    self, variables: Sequence[LaidOut], values: Sequence[LaidOut]
  ) -> tf.Operation:
    return tf.group(
      [
        variable.assign(value, read_value=False)
        for pair in zip(variables, values, strict=True)
        for variable, value in zip(*(x.tensor_list for x in pair), strict=True)
      ]
    )

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
