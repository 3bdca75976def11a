# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Products with constant weights equal NumPy's."""

import ml_dtypes
import numpy as np
import pytest

from palm_mtf._tf import eager_mode, tf, tf2
from palm_mtf.generation.decode.kernels import (
  find_largest,
  round_to_int4,
  round_to_int8,
)

ROWS, INNER, OUTER = 3, 20, 7


def random(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_numbers_are_rounded_to_255_of_a_column():
  w = random(1, INNER, OUTER)
  w[:, 3] = 0  # a channel of zeros also has a scale
  scale = np.abs(w).max(0) / 127
  scale[3] = 1
  with tf.Graph().as_default(), tf.Session() as session:
    largest = find_largest(tf.constant(w))
    whole = round_to_int8(tf.constant(w), largest)
    part = round_to_int8(tf.constant(w[:5]), largest)
    whole, part = session.run([whole, part])
  np.testing.assert_allclose(whole, np.round(w / scale) * scale, rtol=1e-5)
  np.testing.assert_array_equal(part, whole[:5])


@pytest.mark.parametrize(
  ("round_weights", "most"),
  [
    pytest.param(lambda w: round_to_int8(w, find_largest(w)), 127, id="int8"),
    pytest.param(round_to_int4, 8, id="int4"),
  ],
)
def test_xla_rounds_weights_as_hosts_do(round_weights, most):
  """Weights lie next to the middle of two multiples of their scale."""
  largest = np.abs(random(2, 1, 50)).astype(ml_dtypes.bfloat16)
  largest = largest.astype(np.float32)
  middles = ((np.arange(most) + 0.5)[:, None] / most * largest)[:7]
  middles = middles.astype(np.float32)
  above, below = (np.nextafter(middles, np.float32(x)) for x in (9, 0))
  w = np.concatenate([-largest, middles, above, below])
  with eager_mode():
    expected = round_weights(tf.constant(w))
    compiled = tf2.function(round_weights, jit_compile=True)(tf.constant(w))
  np.testing.assert_allclose(compiled, expected, rtol=1e-6)


def test_a_group_of_int4_has_the_scale_with_the_least_error():
  w = random(0, 32, 50)
  w[:, 0] = 0
  w[20:] = 0  # padding of the last group
  with tf.Graph().as_default(), tf.Session() as session:
    found = session.run(round_to_int4(tf.constant(w[:20])))
  extreme = np.where(w.max(0) > -w.min(0), w.max(0), w.min(0))
  losses = []
  for share in (1, 0.95, 0.9, 0.85, 0.8, 0.75):
    scale = (extreme * share / -8).astype(tf.bfloat16.as_numpy_dtype)
    divisor = np.where(scale == 0, 1, scale.astype(np.float32))
    numbers = np.clip(np.round(w / divisor), -8, 7)
    losses.append(np.square(numbers * divisor - w).sum(0))
  loss = np.square(found - w[:20]).sum(0)
  np.testing.assert_allclose(loss, np.min(losses, 0), rtol=1e-5)
  assert len(set(np.argmin(losses, 0))) > 1  # it depends on the group
  np.testing.assert_array_equal(found[:, 0], 0)
