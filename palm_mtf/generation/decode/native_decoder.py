# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding steps in one operation, on one CPU device."""

from palm_mtf._tf import tf
from palm_mtf.accounting.architecture import layer_name
from palm_mtf.generation.decode.decoder import Cache, Decoder
from palm_mtf.generation.decode.weights import DecodeWeights, LaidOut
from palm_mtf.model.layers import sines_and_cosines
from palm_mtf.native.decoding import (
  StepWeights,
  Texts,
  TextSteps,
  decode_step,
  text_steps,
)


def make_decoder(weights: DecodeWeights) -> "Decoder | NativeDecoder":
  """Returns what builds steps with these weights."""
  return (NativeDecoder if weights.is_packed else Decoder)(weights)


class NativeDecoder:
  """Builds steps of packed weights; keeps no state."""

  def __init__(self, weights: DecodeWeights):
    """Readies weights for steps; call it outside of the loop over them."""
    self._impl, self._config = weights.impl, weights.config
    norms = ["norm", "mlp_norm"][: 1 + (self._config.block == "serial")]
    scales = [
      weights.scales[f"{layer_name(layer)}/{norm}/scale"]
      for layer in range(self._config.num_layers)
      for norm in norms
    ]
    scales.append(weights.last_scale())
    # A dict keeps its order: a layer's products, as a step has them, in turn.
    kernels = [x.kernel for x in weights.kernels.values()]
    (self._table,) = weights.table.tensor_list
    self._scales = [x.tensor_list[0] for x in scales]
    self._kernels = [
      x.tensor_list[0].packed for x in (*kernels, weights.to_logits)
    ]

  def step(
    self, tokens: LaidOut, position: LaidOut, cache: Cache
  ) -> tuple[LaidOut, Cache]:
    """Reads one token of every row; see `Decoder.step`."""
    weights = self._weights(cache)

    def step(tokens, position, *cache):
      logits, after = decode_step(weights, tokens, position, cache)
      # Rows that pad the table have logits too; they lie behind all tokens.
      return (logits[:, : self._config.vocab_size], *after)

    logits, *after = self._impl.slicewise(step, tokens, position, *cache)
    return logits, after

  def text_steps(
    self, count: tf.Tensor, texts: Texts, cache: Cache, **settings: object
  ) -> TextSteps:
    """Goes on with texts; see `native.decoding.text_steps`."""
    steps = text_steps(
      self._weights(cache),
      count,
      texts,
      [x.tensor_list[0] for x in cache],
      **settings,
    )
    cache = [self._impl.LaidOutTensor([x]) for x in steps.cache]
    # Rows that pad the table have logits too; they lie behind all tokens.
    logits = steps.logits[:, : self._config.vocab_size]
    return steps._replace(cache=cache, logits=logits)

  def _weights(self, cache):
    tables = sines_and_cosines(cache[0].slice_shape[-2], self._config.d_kv)
    return StepWeights(
      config=self._config,
      tables=(self._table, *tables),
      scales=self._scales,
      kernels=self._kernels,
    )
