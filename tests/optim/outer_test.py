# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The outer update of DiLoCo, and what pods send, against NumPy in float64."""

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.accounting.memory import coded_bytes
from palm_mtf.optim.outer import decode, encode, mean_of, merge, outer_step

RNG = np.random.default_rng(0)
P = RNG.normal(size=(7, 111)).astype(np.float32)
LOCAL = P - 1e-3 * RNG.normal(size=P.shape).astype(np.float32)
LOCAL[0] = P[0]  # a change of 0


def rounded(delta: np.ndarray, dtype: str) -> np.ndarray:
  """Returns changes as a pod's peers see them, in float64."""
  if dtype == "float32":
    return delta
  if dtype == "bfloat16":
    return delta.astype(tf.bfloat16.as_numpy_dtype).astype(np.float64)
  flat = np.zeros(-(-delta.size // 256) * 256)
  flat[: delta.size] = delta.ravel()
  groups = flat.reshape(-1, 256)
  largest = np.abs(groups).max(axis=1, keepdims=True)
  if dtype == "int8":
    steps = np.arange(-127, 128) / 127
  else:  # 2501.18512: a sign, 3 bits of exponent and none of mantissa
    powers = 2.0 ** np.arange(-6, 1)
    steps = np.concatenate([-powers[::-1], [0], powers])
  numbers = largest[..., None] * steps  # all that can be sent
  nearest = np.abs(groups[..., None] - numbers).argmin(-1)
  found = np.take_along_axis(numbers, nearest[..., None], -1)[..., 0]
  return found.ravel()[: delta.size].reshape(delta.shape)


@pytest.mark.parametrize(
  ("dtype", "num_bytes"),
  [
    ("float32", 4 * P.size),
    ("bfloat16", 2 * P.size),
    ("int8", 4 * (256 + 4)),  # 777 numbers are 4 groups with a scale each
    ("e3m0", 4 * (128 + 4)),
  ],
)
def test_what_pods_send_is_the_nearest_number_of_the_dtype(dtype, num_bytes):
  """NumPy and TensorFlow send the same bits, and decode the same bits."""
  sent = encode(P, LOCAL, dtype)
  assert sum(x.nbytes for x in sent if x is not None) == num_bytes
  assert coded_bytes("layer_000/mlp/wi", P.size, dtype) == num_bytes
  found = decode(P, sent, dtype)
  delta = (P - LOCAL).astype(np.float64)
  np.testing.assert_allclose(P - found, rounded(delta, dtype), 1e-4, 3e-7)
  if dtype == "float32":
    np.testing.assert_array_equal(found, LOCAL)
  with tf.Graph().as_default(), tf.Session() as session:
    by_tf = encode(tf.constant(P), tf.constant(LOCAL), dtype)
    decoded = decode(tf.constant(P), by_tf, dtype)
    codes, again = session.run([by_tf.codes, decoded])
  np.testing.assert_array_equal(codes, sent.codes)
  np.testing.assert_array_equal(again, found)


@pytest.mark.parametrize("dtype", ["int8", "e3m0"])
def test_a_parameter_that_does_not_change_stays_the_same(dtype):
  """So weights that pruning has set to 0 stay 0."""
  found = decode(P, encode(P, P, dtype), dtype)
  np.testing.assert_array_equal(found, P)


@pytest.mark.parametrize("lr", [0.0, 0.3, 0.7, 1.0, 1.5])
def test_a_parameter_that_no_pod_changes_keeps_its_bits(lr):
  """For any rate; (1 - lr) p + lr p would drift by its rounding."""
  found, momentum = outer_step(P, 0 * P, P, lr, 0.9)
  assert found.tobytes() == P.tobytes()
  assert not momentum.any()


def test_nesterov_is_that_of_the_paper():
  """2311.08105, Algorithm 1, with OuterOpt = SGD with Nesterov momentum."""
  p, b = P, np.zeros_like(P)
  exact, velocity = P.astype(np.float64), np.zeros(P.shape)
  for _ in range(5):
    mean = (p - RNG.normal(size=p.shape)).astype(np.float32)
    delta = exact - (exact + (mean - p).astype(np.float64))
    velocity = 0.9 * velocity + delta
    exact = exact - 0.7 * (delta + 0.9 * velocity)
    p, b = outer_step(p, b, mean, 0.7, 0.9)
  np.testing.assert_allclose(p, exact, 1e-5, 1e-5)
  np.testing.assert_allclose(b, velocity, 1e-5, 1e-5)


def test_with_rate_1_and_no_momentum_the_outer_parameters_are_the_mean():
  """And a pod that keeps nothing of its own takes them, bit for bit."""
  for mean in (LOCAL, np.float32([-0.0, 1e-45, 3e38])):
    p = np.ones_like(mean)
    outer, _ = outer_step(p, p, mean_of([mean]), 1.0, 0.0)
    assert merge(p, outer, 0.0).tobytes() == mean.tobytes()


def test_one_step_of_sgd_per_round_is_a_step_by_the_mean_gradient():
  """Bit for bit, because all numbers here are exact in float32."""
  p = RNG.integers(-99, 99, [8, 8]).astype(np.float32)
  gradients = RNG.integers(-99, 99, [4, 8, 8]).astype(np.float32)
  local = [p - np.float32(0.25) * g for g in gradients]
  outer, _ = outer_step(p, 0 * p, mean_of(local), 1.0, 0.0)
  np.testing.assert_array_equal(outer, p - 0.25 * gradients.mean(axis=0))


@pytest.mark.peers
def test_the_outer_update_is_pytorchs_sgd():
  """With nesterov=True, as torchft runs it."""
  torch = pytest.importorskip("torch")
  p, b = P, np.zeros_like(P)
  theirs = torch.nn.Parameter(torch.tensor(P))
  sgd = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
  for _ in range(5):
    delta = RNG.normal(size=p.shape).astype(np.float32)
    theirs.grad = torch.tensor(delta)
    sgd.step()
    p, b = outer_step(p, b, p - delta, 0.7, 0.9)
  np.testing.assert_allclose(p, theirs.detach().numpy(), 1e-5, 1e-5)
