# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The work between a product and its layers equals float64 arithmetic."""

import ml_dtypes
import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.native import layers as native
from palm_mtf.native.operations import operations

pytestmark = pytest.mark.skipif(
  operations() is None, reason="there is no C++ compiler here"
)

BATCH, LENGTH, D_KV = 3, 5, 6
ROWS = BATCH * LENGTH
# Columns of q, k, v, wi_gate and wi, and whether wi_gate and wi exist. No size
# fills registers of 4, 8 or 16 numbers.
PARTS = {
  "multi-query": ([4 * D_KV, D_KV, D_KV, 37, 37], True),
  "multi-head": ([4 * D_KV, 4 * D_KV, 4 * D_KV, 70, 70], True),
  "attention alone": ([2 * D_KV, D_KV, D_KV], False),
  "gates alone": ([133, 133], True),
}
DTYPES = {"float32": (np.float32, 3e-6), "bfloat16": (ml_dtypes.bfloat16, 5e-3)}


def angles_of(names):
  """Returns sin and cos of each position, or () without q and k."""
  if names == "gates alone":
    return ()
  angle = np.random.default_rng(7).uniform(0, 6, [LENGTH, D_KV // 2])
  return np.sin(angle).astype(np.float32), np.cos(angle).astype(np.float32)


def expected_parts(wide, sizes, angles, is_gated):
  """Returns the parts of a product by the paper's definition, in float64."""
  parts = np.split(wide.astype(np.float64), np.cumsum(sizes)[:-1], 1)
  if angles:
    parts[:2] = [rotated(x, *angles) for x in parts[:2]]
  if is_gated:
    *parts, gate, x = parts
    parts.append(gate / (1 + np.exp(-gate)) * x)
  return parts


def rotated(x, sin, cos):
  heads = x.reshape([BATCH, LENGTH, -1, 2, D_KV // 2])
  sin, cos = sin[:, np.newaxis], cos[:, np.newaxis]
  x1, x2 = heads[..., 0, :], heads[..., 1, :]
  y = np.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -2)
  return y.reshape(x.shape)


def run(names, dtype, threads=2, seed=0, size=3.0):
  """Returns a product, gradients of its parts, and both operations' results."""
  sizes, is_gated = PARTS[names]
  angles = angles_of(names)
  rng = np.random.default_rng(seed)
  wide = (size * rng.standard_normal([ROWS, sum(sizes)])).astype(dtype)
  read = sizes[:-1] if is_gated else sizes
  dys = [rng.standard_normal([ROWS, n]).astype(dtype) for n in read]
  how = {"is_gated": is_gated, "threads": threads}
  with tf.Graph().as_default(), tf.Session() as session:
    inputs = [tf.constant(x) for x in angles]
    parts = native.read_product(tf.constant(wide), sizes, inputs, **how)
    gradient = native.read_product_gradient(
      tf.constant(wide), list(map(tf.constant, dys)), sizes, inputs, **how
    )
    return wide, dys, *session.run([parts, gradient])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("names", PARTS)
def test_parts_are_split_rotated_and_gated_as_in_the_paper(names, dtype):
  kind, tolerance = DTYPES[dtype]
  wide, _, parts, _ = run(names, kind)
  sizes, is_gated = PARTS[names]
  expected = expected_parts(wide, sizes, angles_of(names), is_gated)
  for part, x in zip(parts, expected, strict=True):
    assert part.dtype == kind
    np.testing.assert_allclose(part.astype(np.float64), x, tolerance, tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("names", PARTS)
def test_the_gradient_equals_finite_differences(names, dtype):
  kind, tolerance = DTYPES[dtype]
  sizes, is_gated = PARTS[names]
  wide, dys, _, gradient = run(names, kind)
  angles, step = angles_of(names), 1e-5
  wide = wide.astype(np.float64)

  def loss(wide):
    parts = expected_parts(wide, sizes, angles, is_gated)
    terms = zip(parts, dys, strict=True)
    return sum((x * dy.astype(np.float64)).sum(1) for x, dy in terms)  # per row

  for column in range(sum(sizes)):
    moved = np.zeros_like(wide)
    moved[:, column] = step
    slope = (loss(wide + moved) - loss(wide - moved)) / (2 * step)
    found = gradient[:, column].astype(np.float64)
    np.testing.assert_allclose(found, slope, tolerance, 3 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype):
  found = (run("multi-query", DTYPES[dtype][0], threads=x) for x in (1, 3))
  both = ([*parts, gradient] for _, _, parts, gradient in found)
  for one, three in zip(*both, strict=True):
    assert one.tobytes() == three.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_gates_open_or_close_and_nan_stays_nan(dtype):
  kind, _ = DTYPES[dtype]
  gates = np.array([[1e4, -1e4, 88, -88, np.nan, 0]])
  wide = np.concatenate([gates, np.full([1, 6], 2)], 1).astype(kind)
  with tf.Graph().as_default(), tf.Session() as session:
    how = {"sizes": [6, 6], "angles": (), "is_gated": True, "threads": 1}
    x, dy = tf.constant(wide), tf.ones([1, 6], tf.as_dtype(kind))
    gradient = native.read_product_gradient(x, [dy], **how)
    found = session.run([*native.read_product(x, **how), gradient])
  hidden, gradient = (x[0].astype(np.float64) for x in found)
  expected = [2e4, 0, 176, 0, np.nan, 0]
  np.testing.assert_allclose(hidden, expected, rtol=4e-3, atol=1e-30)
  expected = [2, 0, 2, 0, np.nan, 1, 1e4, 0, 88, 0, np.nan, 0]
  np.testing.assert_allclose(gradient, expected, rtol=4e-3, atol=1e-30)
