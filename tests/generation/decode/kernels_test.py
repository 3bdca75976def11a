# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Products with fixed weights are what NumPy gives for their numbers."""

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.generation.decode.kernels import (
  largest_numbers,
  make_kernel,
  product,
  rounded_to_int4,
  to_int8,
  value_of,
)

ROWS, INNER, OUTER = 3, 20, 7


def random(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rows(x, dtype, largest=None):
  """Returns what a product with weights of `dtype` reads."""
  x = tf.constant(x)
  if dtype == "int8":
    largest = largest_numbers(x, 1) if largest is None else largest
    return to_int8(x, largest)
  return (x,)


def multiply(x, w, dtype, *, packed):
  """Returns two products in one session, as a loop would run them."""
  with tf.Graph().as_default(), tf.Session() as session:
    kernel = make_kernel(tf.constant(w), tf.as_dtype(dtype), "w")
    session.run(kernel.initialize)
    result = product(rows(x, dtype), kernel, packed=packed)
    result = value_of(result, tf.float32)
    first = session.run(result)
    np.testing.assert_array_equal(session.run(result), first)
    return first


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("num_rows", [1, ROWS])
def test_float_products_are_numpy_s(packed, num_rows):
  x, w = random(0, num_rows, INNER), random(1, INNER, OUTER)
  y = multiply(x, w, "float32", packed=packed)
  np.testing.assert_allclose(y, x @ w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_int8_products_are_exact_sums_of_rounded_numbers(packed):
  x, w = random(0, ROWS, INNER), random(1, INNER, OUTER)
  w[:, 3] = 0  # a channel of nothing has a scale all the same
  x[1] = 0

  def rounded(values, axis):
    largest = np.abs(values).max(axis, keepdims=True)
    scale = np.where(largest > 0, largest, 1).astype(np.float32) / np.float32(
      127
    )
    return np.round(values / scale), scale

  x_numbers, x_scale = rounded(x, 1)
  w_numbers, w_scale = rounded(w, 0)
  exact = (x_numbers @ w_numbers) * x_scale * w_scale
  y = multiply(x, w, "int8", packed=packed)
  np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-6)
  error = np.abs(y - x @ w).max()
  assert 0 < error < 0.02 * np.abs(x @ w).max()


def test_a_row_of_int8_does_not_depend_on_the_others():
  x, w = random(0, ROWS, INNER), random(1, INNER, OUTER)
  x[0] *= 1000
  alone = multiply(x[1:2], w, "int8", packed=True)
  beside = multiply(x, w, "int8", packed=True)
  np.testing.assert_array_equal(beside[1:2], alone)


def test_parts_of_a_sum_that_share_scales_add_up_to_the_whole():
  x, w = random(0, ROWS, INNER), random(1, INNER, OUTER)
  with tf.Graph().as_default(), tf.Session() as session:
    in_rows, in_columns = largest_numbers(x, 1), largest_numbers(w, 0)
    parts = [
      make_kernel(tf.constant(part), tf.int8, "w", in_columns)
      for part in np.split(w, 2)
    ]
    session.run([part.initialize for part in parts])
    products = [
      product(rows(some, "int8", in_rows), kernel, packed=True)
      for some, kernel in zip(np.split(x, 2, axis=1), parts, strict=True)
    ]
    total = session.run(sum(value_of(each, tf.float32) for each in products))
  whole = multiply(x, w, "int8", packed=True)
  np.testing.assert_allclose(total, whole, rtol=1e-5, atol=1e-6)


def test_a_group_of_int4_has_the_scale_that_loses_least():
  w = random(0, 32, 50)
  w[:, 0] = 0
  w[20:] = 0  # what pads the last group
  with tf.Graph().as_default(), tf.Session() as session:
    found = session.run(rounded_to_int4(tf.constant(w[:20])))
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
