# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The hash equals JAX's Threefry-2x32."""

import numpy as np
from jax.extend.random import threefry_2x32

from palm_mtf._tf import tf
from palm_mtf.ops.threefry import threefry


def test_the_hash_is_threefry():
  rng = np.random.default_rng(0)
  key = rng.integers(2**32, size=2, dtype=np.uint32)
  counter = rng.integers(2**32, size=[2, 50], dtype=np.uint32)
  expected = threefry_2x32(key, counter.ravel())

  @tf.function(jit_compile=True)
  def hashed(key, counter):
    return tf.stack(threefry(tf.unstack(key), tf.unstack(counter)))

  with tf.Graph().as_default(), tf.Session() as session:
    actual = session.run(hashed(tf.constant(key), tf.constant(counter)))
  np.testing.assert_array_equal(actual.ravel(), np.asarray(expected))
