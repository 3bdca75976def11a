# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Norms in C++, and their gradients, equal float64 arithmetic."""

import ml_dtypes
import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.native import layers as native
from palm_mtf.native.operations import operations

pytestmark = pytest.mark.skipif(
  operations() is None, reason="there is no C++ compiler here"
)

DTYPES = {"float32": (np.float32, 2e-6), "bfloat16": (ml_dtypes.bfloat16, 5e-3)}


def normed(x, scale, dy, is_centered, threads=2):
  """Returns y, dx and dscale."""
  how = dict(is_centered=is_centered, epsilon=1e-6, threads=threads)
  with tf.Graph().as_default(), tf.Session() as session:
    x, scale, dy = (tf.constant(each) for each in (x, scale, dy))
    y = native.norm(x, scale, **how)
    return session.run([y, *native.norm_gradient(x, scale, dy, **how)])


def exact(x, scale, is_centered):
  """Returns the norm of rows, by definition."""
  if is_centered:
    x = x - x.mean(1, keepdims=True)
  return x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6) * scale


def given(kind, rows, size, seed=0):
  """Returns x, scale and dy; rows have means, and very different sizes."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal([rows, size]) + 0.5
  x *= 10.0 ** rng.integers(-2, 3, size=[rows, 1])
  scale = rng.uniform(0.5, 2, size).astype(np.float32)
  return x.astype(kind), scale, rng.standard_normal([rows, size]).astype(kind)


# Sizes with full registers, with a part of a register, and with none.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_centered", [False, True])
@pytest.mark.parametrize("size", [5, 37, 64])
def test_norm_and_gradients_equal_float64(size, is_centered, dtype):
  kind, limit = DTYPES[dtype]
  x, scale, dy = given(kind, 150, size)
  y, dx, dscale = normed(x, scale, dy, is_centered)
  x, dy = x.astype(np.float64), dy.astype(np.float64)
  np.testing.assert_allclose(
    y.astype(float), exact(x, scale, is_centered), rtol=limit, atol=4 * limit
  )
  # By finite differences, relative to the size of each row.
  step = 1e-5 * np.abs(x).max(1)
  for column in range(size):
    moved = np.zeros_like(x)
    moved[:, column] = step
    up, down = (exact(x + s * moved, scale, is_centered) for s in (1, -1))
    slope = ((up - down) * dy).sum(1) / (2 * step)
    size_of = np.abs(dx.astype(float)).max(1)
    error = np.abs(dx[:, column] - slope) / size_of
    assert error.max() < 3 * limit
  np.testing.assert_allclose(
    dscale, (dy * exact(x, 1, is_centered)).sum(0), rtol=1e-5, atol=1e-4
  )


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype):
  inputs = given(DTYPES[dtype][0], 900, 512)
  one, three = (normed(*inputs, True, threads=n) for n in (1, 3))
  for x, y in zip(one, three, strict=True):
    assert x.tobytes() == y.tobytes()
