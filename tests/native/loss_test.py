# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sums of logits in C++ equal float64 arithmetic."""

import ml_dtypes
import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.native import layers as native
from palm_mtf.native.operations import operations

pytestmark = pytest.mark.skipif(
  operations() is None, reason="there is no C++ compiler here"
)

ROWS = 15
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def sums_of(logits, targets, threads=2):
  with tf.Graph().as_default(), tf.Session() as session:
    sums = native.sum_logits(
      tf.constant(logits), tf.constant(targets, tf.int32), threads=threads
    )
    return session.run(sums)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 5, 16, 1003])
def test_sums_of_logits_equal_float64(vocab, dtype):
  rng = np.random.default_rng(vocab)
  logits = (20 * rng.standard_normal([ROWS, vocab])).astype(DTYPES[dtype])
  targets = rng.integers(-1, vocab, size=ROWS)
  largest, normalizer, target = sums_of(logits, targets)
  exact = logits.astype(np.float64)
  np.testing.assert_array_equal(largest, exact.max(1))
  expected = np.exp(exact - exact.max(1, keepdims=True)).sum(1)
  np.testing.assert_allclose(normalizer, expected, rtol=1e-6)
  of_target = np.where(targets < 0, 0, exact[np.arange(ROWS), targets])
  np.testing.assert_array_equal(target, of_target)


def test_small_powers_of_a_large_vocabulary_are_not_rounded_off():
  """Each is half of the last place of a sum that has the largest power."""
  logits = np.zeros([1, 2**18], np.float32)
  logits[0, 5] = 16.6
  _, (normalizer,), _ = sums_of(logits, [0])
  exact = 1 + (2**18 - 1) * np.exp(-16.6)
  assert abs(normalizer / exact - 1) < 5e-6  # 1e-3 in one sum


def test_nan_logits_affect_only_their_row():
  logits = np.zeros([4, 40], np.float32)
  # In a full register, and after the last one.
  logits[0, 3] = logits[1, 39] = np.nan
  logits[2, 7] = np.inf
  _, normalizer, _ = sums_of(logits, [0, 0, 0, 0])
  np.testing.assert_array_equal(normalizer, [np.nan, np.nan, np.nan, 40])


def test_threads_change_no_bit_of_sums_of_logits():
  rng = np.random.default_rng(0)
  logits = rng.standard_normal([64, 5000]).astype(np.float32)
  targets = rng.integers(5000, size=64)
  one, three = (sums_of(logits, targets, threads=n) for n in (1, 3))
  np.testing.assert_array_equal(one, three)
