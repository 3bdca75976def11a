# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Products with packed weights equal NumPy's."""

import pathlib

import gguf
import ml_dtypes
import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.generation.decode.kernels import multiply, to_int4
from palm_mtf.native.blocks import quantize
from palm_mtf.native.decoding import BLOCK_FORMATS, GROUP, pack, unpack
from tests import processes

# Neither size fills the last group or panel. There are more rows than in a
# tile, and than are prepared at once.
INNER, OUTER = 150, 203
DTYPES = ["float32", "bfloat16", "int8", "int4", *BLOCK_FORMATS]


def random(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def format_of(dtype):
  return dtype if dtype in BLOCK_FORMATS else tf.as_dtype(dtype)


def multiply_in_session(x, w, dtype, parts=1, is_step=True):
  with tf.Graph().as_default(), tf.Session() as session:
    kernel = pack([tf.constant(w)], format_of(dtype))
    xs = [tf.constant(part) for part in np.array_split(x, parts, 1)]
    return session.run(multiply(xs, kernel, is_step=is_step))


def round_to_int8(x, axis):
  scale = np.abs(x).max(axis, keepdims=True).astype(np.float64) / 127
  scale[scale == 0] = 1
  return np.round(x / scale) * scale


def exact(x, w, dtype):
  """Returns the product of the rounded numbers, in float64."""
  if dtype == "float32":
    return x.astype(np.float64) @ w
  if dtype == "bfloat16":
    return x.astype(np.float64) @ w.astype(ml_dtypes.bfloat16).astype(float)
  assert dtype == "int8"
  return round_to_int8(x, 1) @ round_to_int8(w, 0)


@pytest.mark.parametrize("rows", [1, 2, 8, 400])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_product_is_numpy_s(dtype, rows):
  x, w = random(0, rows, INNER), random(1, INNER, OUTER)
  x[0, 3:] = 0
  w[:, 7] = 0  # a channel of nothing has a scale all the same
  # bfloat16 rows, as in a bfloat16 model, which a CPU may multiply directly.
  if dtype == "bfloat16":
    x = x.astype(ml_dtypes.bfloat16).astype(np.float32)
  y = multiply_in_session(x, w, dtype)
  np.testing.assert_allclose(y, exact(x, w, dtype), atol=2e-4, rtol=1e-5)


# The gguf package reads the weights that an export has, whose rows are filled
# up to a block with zeros.
@pytest.mark.parametrize("inner", [INNER, 600])
@pytest.mark.parametrize("dtype", BLOCK_FORMATS)
def test_products_with_k_quants_are_those_of_the_file(dtype, inner):
  x, w = random(0, 7, inner), random(1, inner, OUTER)
  x[0, 3:] = 0
  w[:, 7] = 0
  columns = np.pad(w.T, [[0, 0], [0, -inner % 256]])
  kind = gguf.GGMLQuantizationType[dtype.upper()]
  weights = gguf.quants.dequantize(quantize(columns, dtype), kind)
  y = multiply_in_session(x, w, dtype)
  # The rows of x have a scale per 32 numbers, as in llama.cpp.
  rows = np.pad(x, [[0, 0], [0, -inner % 32]]).reshape(7, -1, 32)
  rows = round_to_int8(rows, 2).reshape(7, -1)[:, :inner]
  expected = rows @ weights[:, :inner].T.astype(float)
  np.testing.assert_allclose(y, expected, atol=2e-4, rtol=1e-5)


def quantized_to_int4(w):
  # Each row picks one weight; such rows are exact in int8.
  return multiply_in_session(np.eye(INNER, dtype=np.float32), w, "int4")


def test_int4_weights_have_16_values_per_group_and_small_errors():
  w = random(1, INNER, OUTER)
  read = quantized_to_int4(w)
  for begin in range(0, INNER, GROUP):
    group = read[begin : begin + GROUP]
    for column in range(OUTER):
      assert len(np.unique(group[:, column])) <= 16
  error = np.square(read - w).mean() / np.square(w).mean()
  # A step is an eighth of the largest of GROUP numbers. The mean square error
  # of rounding is a twelfth of the square of a step.
  largest = np.abs(random(2, GROUP, 10_000)).max(0)
  assert error < np.square(largest / 8).mean() / 12


def test_int4_weights_have_the_error_of_the_best_of_six_scales():
  w = random(1, INNER, OUTER)
  w[:, 7] = 0
  with tf.Graph().as_default(), tf.Session() as session:
    numbers, scale = session.run(to_int4(tf.constant(w)))
  scale = np.repeat(scale.astype(np.float64), GROUP, 0)[:INNER]
  # Scales with equal errors may differ by the order of a sum.
  least, found = numbers * scale - w, quantized_to_int4(w) - w
  groups = range(0, INNER, GROUP)
  ours, best = (np.add.reduceat(np.square(x), groups) for x in (found, least))
  np.testing.assert_allclose(ours, best, rtol=1e-4, atol=1e-12)


def panels(ws, dtype, **how):
  with tf.Graph().as_default(), tf.Session() as session:
    ws = [tf.constant(w) for w in ws]
    packed = pack(ws, format_of(dtype), **how)
    found = session.run(packed.panels)
  assert found.shape == tuple(packed.panels.shape), "not what the graph knows"
  return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_are_packed_as_the_whole(dtype):
  w = random(1, INNER, OUTER)
  whole = panels([w], dtype)
  columns, rows = np.split(w, [3, 100], 1), np.split(w, [3, 100], 0)
  np.testing.assert_array_equal(panels(columns, dtype), whole)
  np.testing.assert_array_equal(panels(rows, dtype, joins_rows=True), whole)
  np.testing.assert_array_equal(panels([w.T], dtype, is_transposed=True), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_rounded_to_bfloat16_before_they_are_quantized(dtype):
  w = random(1, INNER, OUTER)
  rounded = w.astype(ml_dtypes.bfloat16).astype(np.float32)
  assert np.any(rounded != w)
  found = panels([w], dtype, is_rounded=True)
  np.testing.assert_array_equal(found, panels([rounded], dtype))


def test_int4_products_are_sums_of_the_quantized_numbers():
  x, w = random(0, 7, INNER), random(1, INNER, OUTER)
  weights = quantized_to_int4(w)
  y = multiply_in_session(x, w, "int4")
  expected = round_to_int8(x, 1) @ weights.astype(np.float64)
  np.testing.assert_allclose(y, expected, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_whatever_other_rows_there_are(dtype):
  x, w = random(0, 13, INNER), random(1, INNER, OUTER)
  whole = multiply_in_session(x, w, dtype)
  for rows in (slice(0, 1), slice(3, 5), slice(6, 13)):
    found = multiply_in_session(x[rows], w, dtype)
    np.testing.assert_array_equal(found, whole[rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_come_in_parts(dtype):
  x, w = random(0, 3, INNER), random(1, INNER, OUTER)
  one, two = (multiply_in_session(x, w, dtype, parts=n) for n in (1, 2))
  np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("inner", [INNER, INNER + 1, 1])
def test_unpacked_bfloat16_is_what_was_packed(inner):
  w = random(1, inner, OUTER).astype(ml_dtypes.bfloat16)
  with tf.Graph().as_default(), tf.Session() as session:
    kernel = pack([tf.constant(w.astype(np.float32))], tf.bfloat16)
    found = session.run(unpack(kernel, inner))
  np.testing.assert_array_equal(found, w)


# Computes as a CPU with AVX2, and as a CPU without, in separate processes.
@pytest.mark.slow
@pytest.mark.parametrize("limit", ["AVX2", "SSE41"])
def test_lesser_cpus_compute_the_same(limit):
  folder = pathlib.Path(__file__).parent
  names = ("packing", "self_attention", "norm")
  tests = [folder / f"{name}_test.py" for name in names]
  run = processes.python(
    *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not lesser"),
    *tests,
    variables={"ONEDNN_MAX_CPU_ISA": limit},
  )
  assert run.returncode == 0, run.stdout
