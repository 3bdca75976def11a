# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sums of all numbers of a tensor."""

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.ops.sums import fused_sum


@fused_sum
def sum_of_products(x, y):
  return x * y


def found(x, y, threads=2):
  config = tf.ConfigProto(intra_op_parallelism_threads=threads)
  with tf.Graph().as_default(), tf.Session(config=config) as session:
    return session.run(sum_of_products(tf.constant(x), tf.constant(y)))


@pytest.mark.parametrize("shape", [[], [1], [7], [8], [3, 5], [64, 33, 40]])
def test_a_sum_is_that_of_all_numbers(shape):
  rng = np.random.default_rng(0)
  x, y = rng.uniform(0.5, 1.5, [2, *shape]).astype(np.float32)
  np.testing.assert_allclose(
    found(x, y), (x.astype(np.float64) * y).sum(), rtol=1e-5
  )


def test_a_sum_has_the_same_bits_on_any_number_of_cores():
  rng = np.random.default_rng(0)
  x, y = rng.standard_normal([2, 512, 2048]).astype(np.float32)
  sums = {found(x, y, threads) for threads in (1, 2, 3, 7)}
  assert len(sums) == 1


def test_an_infinite_number_makes_the_sum_infinite():
  x = np.ones(800, np.float32)
  x[-1] = np.inf
  assert found(x, np.ones_like(x)) == np.inf
