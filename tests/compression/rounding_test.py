# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Rounding by GPTQ: its equations, its gain, and the grid of decoding."""

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.architecture.column_statistics import ColumnStatistics
from palm_mtf.compression.rounding import round_kernel, rounding_reader
from palm_mtf.errors import UserError
from palm_mtf.generation.decode import kernels
from tests.mtf_testing import small_config


def _case(inputs=96, outputs=20):
  """Returns a kernel, and inputs of products that depend on one another."""
  rng = np.random.default_rng(0)
  w = rng.standard_normal([inputs, outputs]).astype(np.float32)
  x = rng.standard_normal([500, inputs]) @ rng.standard_normal([inputs] * 2)
  return w, x


def _round_plainly(w, dtype):
  with tf.Graph().as_default(), tf.Session() as session:
    x = tf.constant(w)
    plain = {
      "int4": lambda: kernels.round_to_int4(x),
      "int8": lambda: kernels.round_to_int8(x, kernels.find_largest(x)),
    }
    return session.run(plain[dtype]())


def _gptq(w, x, dtype, rounded):
  """Equations 2 and 3 of Frantar et al. 2022, with the inverse of H itself.

  The scales and the largest numbers are those of `rounded`.
  """
  h = 2 * x.T @ x
  h += 0.01 * np.diag(h).mean() * np.eye(len(h))
  inverse, w, q = np.linalg.inv(h), w.astype(np.float64), np.zeros(w.shape)
  for i in range(len(w)):
    group = slice(i // 32 * 32, i // 32 * 32 + 32) if dtype == "int4" else ...
    top = np.abs(rounded[group]).max(0)
    scale, low, high = top / 127, -127, 127
    if dtype == "int4":
      at = np.abs(rounded[group]).argmax(0)
      scale = rounded[group][at, np.arange(w.shape[1])] / -8.0
      low, high = -8, 7
    q[i] = np.clip(np.round(w[i] / scale), low, high) * scale
    q[i] = np.where(np.abs(rounded[i]) == top, rounded[i], q[i])
    error = (w[i] - q[i]) / inverse[0, 0]
    w[i:] -= np.outer(inverse[:, 0], error)
    inverse = inverse - np.outer(inverse[:, 0], inverse[0]) / inverse[0, 0]
    inverse = inverse[1:, 1:]
  return q


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_kernels_are_rounded_by_gptq_and_err_less(dtype):
  w, x = _case()
  rounded = round_kernel(w, (x.T @ x).astype(np.float32), dtype)
  same = np.isclose(rounded, _gptq(w, x, dtype, rounded), rtol=1e-5)
  assert same.mean() > 0.999  # a quotient near a half may round otherwise
  plain = _round_plainly(w, dtype)
  errors = [np.square(x @ (y - w)).sum() for y in (rounded, plain)]
  assert errors[0] < 0.6 * errors[1]
  # Decoding rounds the rounded weights to the same numbers.
  again = _round_plainly(rounded, dtype)
  np.testing.assert_allclose(again, rounded, rtol=1e-6 * (dtype == "int8"))


def test_an_expert_without_tokens_is_rounded_plainly():
  w, _ = _case()
  rounded = round_kernel(w, np.zeros([96, 96], np.float32), "int8")
  np.testing.assert_allclose(rounded, _round_plainly(w, "int8"), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_weights_of_a_scale_that_are_all_0_stay_0(dtype):
  """As in a model with many zeros; 1e-44 has no scale in bfloat16."""
  w, x = _case()
  w[:, 3] = 0.0
  w[:32, 5], w[:32, 6] = 0.0, 1e-44
  rounded = round_kernel(w, x.T @ x, dtype)
  np.testing.assert_array_equal(rounded[:, 3], 0.0)
  np.testing.assert_array_equal(rounded[:32, 5:7], 0.0)


def test_kernels_that_would_share_a_scale_of_int4_are_refused():
  """Decoding joins o and wo of a parallel block along their inputs."""
  model = small_config(num_heads=3, d_kv=8)
  sizes = {"attention/o": 24, "mlp/wo": model.d_ff}
  statistics = {
    f"layer_{i:03d}/{part}": ColumnStatistics(np.ones(size), np.array(9))
    for i in range(model.num_layers)
    for part, size in sizes.items()
  }
  with pytest.raises(UserError, match="inputs of layer_000/attention/o are no"):
    rounding_reader(model, {}.__getitem__, statistics, "int4")
