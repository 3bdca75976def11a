# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps in C++ choose the same tokens as TensorFlow's operations."""

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.generation.decode.forward import prefill
from palm_mtf.generation.decode.sampling import SamplingSettings, choose_tokens
from palm_mtf.generation.decode.step import NativeStep
from palm_mtf.generation.decode.weight_maker import build_decode_model
from palm_mtf.native.decoding import Texts, TextSettings
from palm_mtf.native.operations import operations
from tests import oracle
from tests.mtf_testing import SINGLE, load_decode_model, small_config

ROWS, VOCAB, NUM_TOKENS = 256, 1003, 1000
CONFIG = small_config(vocab_size=VOCAB)
RNG = np.random.default_rng(0)

pytestmark = pytest.mark.skipif(
  operations() is None, reason="there is no C++ compiler"
)


def test_rows_with_different_settings_draw_the_tokens_of_tensorflow():
  def some(values, dtype):
    return tf.constant(RNG.choice(values, ROWS).astype(dtype))

  params = oracle.random_parameters(CONFIG, seed=1)

  with tf.Graph().as_default(), tf.Session() as session:
    model = build_decode_model(CONFIG, SINGLE, "activation")
    pack = model.placement.LaidOutTensor
    one = pack([tf.ones([ROWS], tf.int32)])
    cache = prefill(model, tf.zeros([ROWS, 1], tf.int32), one, 64)
    texts = Texts(
      tokens=some(NUM_TOKENS, np.int32),
      positions=tf.ones([ROWS], tf.int32),
      places=some(2000, np.int32),
      is_over=tf.fill([ROWS], False),
      keys=tf.constant(RNG.integers(-(2**31), 2**31, [ROWS, 2]), tf.int32),
      temperature=some([0.0, 0.5, 1.0, 2.0], np.float32),
      top_k=some([1, 3, 40, NUM_TOKENS], np.int32),
      top_p=some([0.1, 0.5, 0.95, 1.0], np.float32),
    )
    found = NativeStep(model).advance(
      tf.constant(1),
      Texts(*(pack([x]) for x in texts[:8])),
      cache,
      TextSettings(NUM_TOKENS, end_ids=(-1,), keeps_logits=True),
    )
    (logits,), (chosen,) = found.logits.tensor_list, found.chosen.tensor_list
    settings = SamplingSettings(texts.temperature, texts.top_k, texts.top_p)
    expected = choose_tokens(
      logits, tf.constant(False), texts.keys, texts.places, settings, NUM_TOKENS
    )
    load_decode_model(session, model, params)
    logits, chosen, expected = session.run([logits, chosen[:, 0], expected])
  greedy = logits[:, :NUM_TOKENS].argmax(1)
  assert 0.2 < np.mean(expected != greedy) < 0.8
  np.testing.assert_array_equal(chosen, expected)
