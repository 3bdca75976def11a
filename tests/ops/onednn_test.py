# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sums of 8-bit products are exact, with and without instructions for them."""

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.ops.onednn import int8_matmul
from tests.cpus import ZEN_3, pretend_cpu

INNER, OUTER = 1024, 24  # 1,024 * 127 * 127 is below 2^24: float32 holds it


def hard_numbers(rng, shape):
  """Returns numbers of which many pairs overflow 16 bits."""
  extreme = rng.choice([-127, 127], shape)
  return np.where(rng.random(shape) < 0.5, extreme, rng.integers(-127, 128))


def check_int8_sums(num_rows: int, packed: bool) -> None:
  """Fails unless products of hard numbers are what int64 makes of them."""
  rng = np.random.default_rng(num_rows)
  x = hard_numbers(rng, [num_rows, INNER]).astype(np.int8)
  w = hard_numbers(rng, [INNER, OUTER]).astype(np.int8)
  x[0], w[:, 0] = 127, 127  # the largest sum there can be
  exact = x.astype(np.int64) @ w.astype(np.int64)
  scale = 2.0 ** rng.integers(-3, 4, OUTER)  # exact too
  with tf.Graph().as_default(), tf.Session() as session:
    kept = tf.Variable(w, use_resource=True)
    session.run(kept.initializer)
    high = tf.constant(127 * scale, tf.float32)
    y = int8_matmul(tf.constant(x), kept.value(), (-high, high), packed=packed)
    for _ in range(2):
      np.testing.assert_array_equal(session.run(y), exact * scale)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 16])
@pytest.mark.parametrize("is_zen_3", [False, True])
def test_int8_sums_are_exact(tmp_path, monkeypatch, packed, num_rows, is_zen_3):
  if is_zen_3:
    pretend_cpu(ZEN_3, tmp_path, monkeypatch)
  check_int8_sums(num_rows, packed)
