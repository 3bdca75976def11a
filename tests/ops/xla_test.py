# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Updates of variables in their memory."""

import numpy as np
import pytest

from palm_mtf._tf import eager_mode, tf, tf2
from palm_mtf.ops import xla as sums
from palm_mtf.ops.variables import make_variable
from palm_mtf.ops.xla import fused_sum, fused_update


def _swapped(values, factor):
  x, y = values
  return y * factor, x


def summed(values, factor):
  x, y = values
  total = y * factor + x
  return x + total, total


@pytest.mark.parametrize("fn", [_swapped, summed])
def test_all_variables_are_set_from_the_values_before(fn):
  with tf.Graph().as_default(), tf.Session() as session:
    first = [1.0, 2.0], [3.0, 4.0]
    variables = [make_variable(tf.constant(x), "x") for x in first]
    factor = tf.constant([10.0, 100.0])
    update = fused_update(fn)(variables, factor)
    session.run([x.initializer for x in variables])
    x, y = np.array([1.0, 2.0]), np.array([3.0, 4.0])
    for _ in range(2):
      session.run(update)
      x, y = fn([x, y], np.array([10.0, 100.0]))
      values = session.run([each.read_value() for each in variables])
      np.testing.assert_array_equal(values, [x, y])


@fused_sum
def sum_of_products(x, y):
  return x * y


def found(x, y, threads=2):
  config = tf.ConfigProto(intra_op_parallelism_threads=threads)
  with tf.Graph().as_default(), tf.Session(config=config) as session:
    return session.run(sum_of_products(tf.constant(x), tf.constant(y)))


@pytest.mark.parametrize(
  "shape", [[], [1], [7], [8], [3, 5], [64, 33, 40], [99_991]]
)
def test_a_sum_is_that_of_all_numbers(shape):
  rng = np.random.default_rng(0)
  x, y = rng.uniform(0.5, 1.5, [2, *shape]).astype(np.float32)
  exact = (x.astype(np.float64) * y).sum()
  np.testing.assert_allclose(found(x, y), exact, rtol=1e-5)


def test_a_sum_has_the_same_bits_on_any_number_of_cores():
  rng = np.random.default_rng(0)
  x, y = rng.standard_normal([2, 512, 2048]).astype(np.float32)
  assert len({found(x, y, threads) for threads in (1, 2, 3, 7)}) == 1


def test_an_infinite_number_makes_the_sum_infinite():
  x = np.ones(800, np.float32)
  x[-1] = np.inf
  assert found(x, np.ones_like(x)) == np.inf


@pytest.mark.parametrize("size", [4095, 4096, 131072, 100_003])
def test_no_sum_is_left_to_ynnpack(size):
  """YNNPACK may prepare a sum in two threads at once, without a lock."""
  part = tf2.function(sums._sum.__wrapped__, jit_compile=True)
  with eager_mode():
    compiled = part.experimental_get_compiler_ir(tf.ones([size]))
  assert "ynn" not in compiled(stage="optimized_hlo")
