# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Products on CPUs that lack instructions are those of CPUs that have them."""

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.ops.matmul import einsum, is_emulated, matmul
from tests.cpus import ZEN_3, pretend_cpu

ROWS, INNER, COLUMNS = 5, 96, 7


@pytest.fixture
def no_native_bfloat16(tmp_path, monkeypatch):
  pretend_cpu(ZEN_3, tmp_path, monkeypatch)


def rounded(x):
  """Returns float64 numbers rounded to bfloat16's 8 bits, as float64."""
  mantissa, exponent = np.frexp(x)
  return np.ldexp(np.round(mantissa * 256) / 256, exponent)


def test_products_round_float32_sums_once(no_native_bfloat16):
  rng = np.random.default_rng(0)
  x = rounded(rng.normal(size=[2, ROWS, INNER]))
  y = rounded(rng.normal(size=[2, INNER, COLUMNS]))
  with tf.Graph().as_default(), tf.Session() as session:
    x_, y_ = tf.constant(x, tf.bfloat16), tf.constant(y, tf.bfloat16)
    assert is_emulated(x_)
    found = [
      matmul(x_, y_),
      matmul(x_, tf.transpose(y_, [0, 2, 1]), transpose_b=True),
      einsum("bri,bic->brc", x_, y_),
    ]
    assert {each.dtype for each in found} == {tf.bfloat16}
    found = session.run([tf.cast(each, tf.float32) for each in found])
  exact = x @ y
  for each in found:
    # Half of the last of 8 bits, and what float32 sums are off.
    np.testing.assert_allclose(each, exact, rtol=2**-8, atol=1e-5)
    assert (each == rounded(exact)).mean() > 0.95


@pytest.mark.parametrize("turn_y", [False, True])
@pytest.mark.parametrize("turn_x", [False, True])
def test_a_float32_product_of_bfloat16_numbers_is_not_rounded(turn_x, turn_y):
  rng = np.random.default_rng(0)
  x, y = rounded(rng.normal(size=[64, 96])), rounded(rng.normal(size=[96, 48]))
  xs = x.T if turn_x else x, y.T if turn_y else y
  with tf.Graph().as_default(), tf.Session() as session:
    a, b = (tf.constant(z, tf.bfloat16) for z in xs)
    how = {"transpose_a": turn_x, "transpose_b": turn_y}
    product = matmul(a, b, dtype=tf.float32, **how)
    assert product.shape == [64, 48]
    np.testing.assert_allclose(session.run(product), x @ y, atol=1e-4)


def test_float32_is_not_emulated(no_native_bfloat16):
  with tf.Graph().as_default():
    assert not is_emulated(tf.constant(1.0))


def test_gpus_multiply_bfloat16_themselves(no_native_bfloat16):
  with tf.Graph().as_default(), tf.device("/device:GPU:0"):
    assert not is_emulated(tf.zeros([1], tf.bfloat16))
