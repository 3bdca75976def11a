# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Products with packed weights are what NumPy gives for their numbers."""

import pathlib

import ml_dtypes
import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.decode.matmul import make_packed_kernel, product
from palm_mtf.native.packing import GROUP
from tests import processes

# Neither size fills the last group or panel; more rows than a tile has, and
# than are readied at once.
INNER, OUTER = 150, 203
DTYPES = ["float32", "bfloat16", "int8", "int4"]


def random(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def multiply(x, w, dtype, parts=1):
  with tf.Graph().as_default(), tf.Session() as session:
    kernel = make_packed_kernel(tf.constant(w), tf.as_dtype(dtype), "w")
    session.run(kernel.initialize)
    xs = [tf.constant(part) for part in np.array_split(x, parts, 1)]
    (y,) = product(tuple(xs), kernel, packed=True)
    return session.run(y)


def rounded_to_int8(x, axis):
  scale = np.abs(x).max(axis, keepdims=True).astype(np.float64) / 127
  scale[scale == 0] = 1
  return np.round(x / scale) * scale


def exact(x, w, dtype):
  """Returns the product of what is left of the numbers, in float64."""
  if dtype == "float32":
    return x.astype(np.float64) @ w
  if dtype == "bfloat16":
    return x.astype(np.float64) @ w.astype(ml_dtypes.bfloat16).astype(float)
  assert dtype == "int8"
  return rounded_to_int8(x, 1) @ rounded_to_int8(w, 0)


@pytest.mark.parametrize("rows", [1, 2, 8, 400])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_product_is_numpy_s(dtype, rows):
  x, w = random(0, rows, INNER), random(1, INNER, OUTER)
  x[0, 3:] = 0
  w[:, 7] = 0  # a channel of nothing has a scale all the same
  # bfloat16 rows, as a model of bfloat16 has: a CPU may multiply them so.
  if dtype == "bfloat16":
    x = x.astype(ml_dtypes.bfloat16).astype(np.float32)
  y = multiply(x, w, dtype)
  np.testing.assert_allclose(y, exact(x, w, dtype), atol=2e-4, rtol=1e-5)


def quantized_to_int4(w):
  # Rows that pick one weight each: what a product reads is exact in int8.
  return multiply(np.eye(INNER, dtype=np.float32), w, "int4")


def test_int4_weights_have_16_values_a_group_and_little_is_lost():
  w = random(1, INNER, OUTER)
  read = quantized_to_int4(w)
  for begin in range(0, INNER, GROUP):
    group = read[begin : begin + GROUP]
    for column in range(OUTER):
      assert len(np.unique(group[:, column])) <= 16
  error = np.square(read - w).mean() / np.square(w).mean()
  # A step is an eighth of the largest of GROUP numbers, and the mean square of
  # rounding to steps is a twelfth of a step's.
  largest = np.abs(random(2, GROUP, 10_000)).max(0)
  assert error < np.square(largest / 8).mean() / 12


def test_int4_products_are_sums_of_the_quantized_numbers():
  x, w = random(0, 7, INNER), random(1, INNER, OUTER)
  weights = quantized_to_int4(w)
  y = multiply(x, w, "int4")
  expected = rounded_to_int8(x, 1) @ weights.astype(np.float64)
  np.testing.assert_allclose(y, expected, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_beside_any_others(dtype):
  x, w = random(0, 13, INNER), random(1, INNER, OUTER)
  whole = multiply(x, w, dtype)
  for rows in (slice(0, 1), slice(3, 5), slice(6, 13)):
    np.testing.assert_array_equal(multiply(x[rows], w, dtype), whole[rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_come_in_parts(dtype):
  x, w = random(0, 3, INNER), random(1, INNER, OUTER)
  np.testing.assert_array_equal(
    multiply(x, w, dtype, parts=2), multiply(x, w, dtype)
  )


# What an AVX2 CPU, and one without, compute: in processes of their own.
@pytest.mark.parametrize("limit", ["AVX2", "SSE41"])
def test_lesser_cpus_compute_the_same(limit):
  folder = pathlib.Path(__file__).parent
  tests = [folder / f"{x}_test.py" for x in ("packing", "attention", "norm")]
  run = processes.python(
    *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not lesser"),
    *tests,
    variables={"ONEDNN_MAX_CPU_ISA": limit},
  )
  assert run.returncode == 0, run.stdout
