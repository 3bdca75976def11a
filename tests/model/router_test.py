# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Routers choose the oracle's experts, and learn by the papers' losses."""

import types

import numpy as np
import pytest

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.block import Experts, Mlp
from palm_mtf.config import LossConfig
from palm_mtf.model.router import choose, route, within_capacity
from tests import oracle_mlp
from tests.mtf_testing import lowered_values

TOKENS, WIDTH, COUNT = (2, 7), 8, 5


def experts(**changes):
  settings = {"count": COUNT, "per_token": 2, "router": "softmax"}
  settings |= {"normalizes": True, "scale": 1.0, "has_bias": False}
  settings |= {"capacity_factor": None, **changes}
  return Experts(mlp=Mlp("swish", is_gated=True), **settings)


def settings_of(mixer):
  """Returns the settings under the names that the oracle reads."""
  return types.SimpleNamespace(
    router=mixer.router,
    router_normalizes=mixer.normalizes,
    router_scale=mixer.scale,
    experts_per_token=mixer.per_token,
    num_experts=mixer.count,
    capacity_factor=mixer.capacity_factor,
  )


def run_choose(x, kernel, mixer, dtype="float32", bias=()):
  with tf.Graph().as_default(), tf.Session() as session:
    given = tf.cast(tf.constant(x, tf.float32), dtype), tf.constant(kernel)
    return session.run(choose(*given, [*map(tf.constant, bias)], mixer))


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_of_equal_scores_the_lower_expert_is_chosen(router):
  x, kernel = np.ones([3, 4]), np.zeros([4, 6], np.float32)
  mixer = experts(count=6, per_token=3, router=router)
  gates, choice = run_choose(x, kernel, mixer)
  np.testing.assert_array_equal(choice, [[0, 1, 2]] * 3)
  np.testing.assert_allclose(gates, 1 / 3, rtol=1e-6)


def test_bfloat16_activations_choose_the_experts_of_float32():
  """The scores of experts 0 and 1 differ by less than bfloat16 can hold."""
  x = np.ones([1, 2], np.float32)
  kernel = np.float32([[1.0, 1.0 + 2**-12, 0.0], [0.0, 0.0, 0.0]])
  mixer = experts(count=3, per_token=1, normalizes=False)
  for dtype in ("float32", "bfloat16"):
    _, choice = run_choose(x, kernel, mixer, dtype)
    assert choice.tolist() == [[1]], dtype


def test_a_capacity_is_a_decimal_number_times_an_equal_share():
  assert experts(count=4, capacity_factor=1.1).capacity(100) == 55


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.25, 2.5])
def test_an_expert_drops_exactly_what_exceeds_its_capacity(factor):
  rng, length = np.random.default_rng(0), 12
  mixer = experts(capacity_factor=factor)
  scores = rng.random([3, length, COUNT])
  scores[..., 0] += 0.6  # so that too many tokens choose expert 0
  choice = np.argsort(-scores, -1)[..., :2].astype(np.int32)
  with tf.Graph().as_default(), tf.Session() as session:
    found = session.run(within_capacity(tf.constant(choice), mixer))
  for own, chosen in zip(found, choice, strict=True):
    taken = oracle_mlp.taken(settings_of(mixer), chosen)
    kept = {(*map(int, x),) for x in np.argwhere(own >= 0)}
    assert kept == {(int(x), int(y)) for x, y in taken}
    np.testing.assert_array_equal(own[own >= 0], chosen[own >= 0])


def run_gradients(mixer, loss, x, kernel, load, bias, weights):
  """Returns gradients of sum(gates * weights) in x, kernel and states."""
  names = {
    "x": (x, ("batch", "length", "d_model")),
    "kernel": (kernel, ("d_model", "router")),
    "load": (load, ("router",)),
    "bias": (bias, ("router",)),
    "weights": (weights, ("batch", "length", "chosen")),
  }
  arrays = {
    name: (np.float32(value), [*map(mtf.Dimension, dims, value.shape)])
    for name, (value, dims) in names.items()
  }

  def build(x, kernel, load, bias, weights):
    states = [load, bias] if mixer.has_bias else [load]
    gates, _ = route(x, kernel, states, mixer, loss)
    given = [x, kernel, *states]
    found = mtf.gradients([gates], given, [weights])
    return {str(i): y for i, y in enumerate(found)}

  return [*lowered_values(build, **arrays).values()]


def loss_of_router(mixer, loss, x, kernel, load, bias, weights):
  """Returns sum(gates * weights) plus the router's losses, and the choices."""
  params = {"router": kernel, "router_bias": bias}
  z, p, chosen, gates = oracle_mlp.router(settings_of(mixer), params, x)
  total = np.sum(gates * weights)
  # Fedus et al. 2022, equation 4, with the shares of the previous step.
  total += loss.balance_loss * mixer.count * np.sum(load * p.sum(0))
  # Zoph et al. 2022, equation 5.
  total += loss.router_z_loss * np.sum(np.log(np.exp(z).sum(-1)) ** 2)
  return total, chosen


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"normalizes": False, "per_token": 3, "scale": 2.5},
    {"per_token": 1, "normalizes": False},
    {"router": "sigmoid", "has_bias": True, "scale": 2.5},
    {"router": "sigmoid", "normalizes": False},
  ],
  ids=str,
)
def test_gradients_of_gates_balance_and_z_loss_are_the_papers(changes):
  mixer, loss = experts(**changes), LossConfig(z_loss=0.0, balance_loss=0.0)
  if mixer.router == "softmax":
    loss = LossConfig(z_loss=0.0, balance_loss=0.3, router_z_loss=0.2)
  rng = np.random.default_rng(1)
  x = rng.standard_normal([*TOKENS, WIDTH])
  kernel = rng.standard_normal([WIDTH, COUNT]) / 3
  load = rng.dirichlet(np.ones(COUNT))
  bias = 0.1 * rng.standard_normal(COUNT) * mixer.has_bias
  weights = rng.standard_normal([*TOKENS, mixer.per_token])
  values = run_gradients(mixer, loss, x, kernel, load, bias, weights)
  rows = x.reshape(-1, WIDTH), kernel
  weights = weights.reshape(-1, mixer.per_token)

  def total(x, kernel):
    return loss_of_router(mixer, loss, x, kernel, load, bias, weights)

  for i, (value, gradient) in enumerate(zip(rows, values, strict=False)):
    direction = rng.standard_normal(value.shape)
    up, down = (
      total(*rows[:i], value + sign * 1e-6 * direction, *rows[i + 1 :])[0]
      for sign in (1, -1)
    )
    slope = np.sum(gradient.reshape(value.shape) * direction)
    assert slope == pytest.approx((up - down) / 2e-6, rel=1e-4)
  counts = np.bincount(total(*rows)[1].ravel(), minlength=COUNT)
  for each in values[2:]:
    np.testing.assert_array_equal(each, counts)


def test_equal_shares_give_no_gradient_of_the_balance():
  """With equal shares, the loss is BALANCE_LOSS, whatever the scores are."""
  rng, equal = np.random.default_rng(4), np.full(COUNT, 1 / COUNT)
  shapes = [*TOKENS, WIDTH], [WIDTH, COUNT]
  given = [rng.standard_normal(x) for x in shapes]
  rest = np.zeros(COUNT), np.zeros([*TOKENS, 2])
  loss = LossConfig(z_loss=0.0, balance_loss=1.0)
  dx, dkernel, _ = run_gradients(experts(), loss, *given, equal, *rest)
  assert max(np.abs(dx).max(), np.abs(dkernel).max()) < 1e-5
  other = np.eye(COUNT)[0]
  dx, dkernel, _ = run_gradients(experts(), loss, *given, other, *rest)
  assert min(np.abs(dx).max(), np.abs(dkernel).max()) > 1e-2


def test_one_expert_per_token_teaches_its_router():
  """The gate is not normalized: otherwise it would be 1 for any kernel."""
  mixer = experts(per_token=1, normalizes=False)
  rng = np.random.default_rng(2)
  x = rng.standard_normal([6, WIDTH]).astype(np.float32)
  kernel = rng.standard_normal([WIDTH, COUNT]).astype(np.float32)
  gates, _ = run_choose(x, kernel, mixer)
  moved, _ = run_choose(x, kernel * 1.01, mixer)
  assert np.all(np.abs(moved - gates) > 1e-5)
