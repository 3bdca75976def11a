# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The plain forward pass has the oracle's logits, in one pass and in steps."""

import numpy as np
import pytest

from palm_mtf._tf import tf2
from palm_mtf.export.saved_model.decoder import Decoder
from tests import oracle
from tests.blocks import ALL_HEADS, SETTINGS, fast_only
from tests.mtf_testing import random_tokens, small_config

MODELS = [
  {},
  {"attention": "multi_head"},
  {"norm": "rms_norm"},
  {"block": "serial", "norm": "rms_norm", "attention": "multi_head"},
  {"final_norm_scale": "none"},
]
# These blocks and PaLM's have every value of ATTENTION and of POSITIONS, a
# window, and layers that differ.
FAST = (
  "LLaMA 3",
  "Gemma 3",
  "Cohere 2",
  "Mistral",
  "Gopher",
  "LaMDA",
  "GPT-2",
  "BLOOM",
  "no positions",
)


def _decoder(model, params) -> Decoder:
  return Decoder(model, lambda name: params[name].astype(np.float32))


@pytest.mark.parametrize(
  "changes", [*MODELS, *fast_only(*FAST), "norms of groups of heads"], ids=str
)
def test_logits_equal_the_oracles_in_one_pass_and_in_steps(changes):
  every = {**SETTINGS, **ALL_HEADS}
  settings = every[changes] if isinstance(changes, str) else changes
  model = small_config(**settings)
  params = oracle.random_parameters(model, seed=1)
  inputs = random_tokens(model, batch_size=2, seed=0)["inputs"]
  expected = oracle.forward(model, params, inputs)
  decoder, length = _decoder(model, params), inputs.shape[1]
  for cuts in ([length], [3, 4, length]):
    cache, found, start = decoder.make_empty_cache(2, length), [], 0
    for stop in cuts:
      at = tf2.constant([start, start])
      y, cache = decoder.hidden(inputs[:, start:stop], at, cache)
      found.append(decoder.logits(y))
      start = stop
    difference = np.abs(np.concatenate(found, 1) - expected)
    assert difference.max() < 1e-5 * np.ptp(expected)


def test_rows_at_different_positions_see_only_their_own_tokens():
  model = small_config()
  params = oracle.random_parameters(model, seed=1)
  inputs = random_tokens(model, batch_size=2, seed=0)["inputs"]
  decoder = _decoder(model, params)
  # The second prompt has 2 tokens; its padding is overwritten.
  cache = decoder.make_empty_cache(2, 6)
  _, cache = decoder.hidden(inputs[:, :4], tf2.constant([0, 0]), cache)
  following = tf2.constant([[inputs[0, 4]], [inputs[1, 2]]])
  y, _ = decoder.hidden(following, tf2.constant([4, 2]), cache)
  for row, length in ((0, 5), (1, 3)):
    expected = oracle.forward(model, params, inputs[row : row + 1, :length])
    np.testing.assert_allclose(
      decoder.logits(y)[row, 0], expected[0, -1], rtol=1e-4, atol=1e-4
    )


def test_given_tokens_attend_in_both_directions_and_padding_to_none():
  model = small_config(objective="prefix_lm")
  params = oracle.random_parameters(model, seed=1)
  inputs = random_tokens(model, batch_size=2, seed=0)["inputs"]
  decoder, num_given = _decoder(model, params), [4, 2]
  cache = decoder.make_empty_cache(2, 6)
  y, cache = decoder.hidden(
    inputs[:, :4], tf2.constant([0, 0]), cache, tf2.constant(num_given)
  )
  following = tf2.constant([[inputs[0, 4]], [inputs[1, 2]]])
  z, _ = decoder.hidden(following, tf2.constant(num_given), cache)
  for row, given in enumerate(num_given):
    tokens = inputs[row : row + 1, : given + 1]
    prefix = np.array([[1] * given + [0]])
    expected = oracle.forward(model, params, tokens, prefix=prefix)[0]
    found = decoder.logits(tf2.concat([y[row, :given], z[row]], 0))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
