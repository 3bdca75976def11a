# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Chooses the experts of each token, and the gates that multiply their results.

For a token x with the router's kernel W, both float32:

  z      = x W                                      one number per expert
  p      = softmax(z), or sigmoid(z)                ROUTER
  chosen = the EXPERTS_PER_TOKEN experts with the highest p, or p + router_bias
  gate_e = ROUTER_SCALE p_e / sum of p over chosen  divided if ROUTER_NORMALIZES

With "softmax", the loss has a term that balances the experts (Fedus et al.
2022, equation 4). Over all tokens of a step, it is

  BALANCE_LOSS NUM_EXPERTS sum over e of f_e mean(p_e)

where f_e is the share of choices that expert e gets. If all experts get equal
shares, the term is BALANCE_LOSS. In the paper, f_e is the share in the same
step; here, f_e is the share in the previous step, which the state
"mlp/router_load" holds. So the term is a sum over tokens, and a microbatch, pod
or device needs no counts from others before its backward pass. A second term,
the router's z-loss, is ROUTER_Z_LOSS mean(log(sum over e of exp(z_e))^2) (Zoph
et al. 2022, equation 5). The forward pass does not compute these terms; the
backward pass adds their gradients to the gradient of z.
"""

from collections.abc import Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.block import Experts
from palm_mtf.config import LossConfig
from palm_mtf.model.layers import to_rows
from palm_mtf.ops.matmul import matmul
from palm_mtf.ops.recompute import recompute
from palm_mtf.ops.slicewise import WholeSlice
from palm_mtf.ops.xla import fused

# Added to a sum of scores before a division, because sigmoids may all be 0.
_SMALLEST_SUM = 1e-20


def _rows(x):
  return tf.cast(to_rows(x), tf.float32)


def _products(x, kernel):
  return matmul(_rows(x), kernel, is_exact=True)


def _probabilities(z, router):
  return tf.nn.softmax(z) if router == "softmax" else tf.sigmoid(z)


def _select(values, choice):
  # Returns the chosen experts' values, [tokens, chosen], of [tokens, experts].
  return tf.gather(values, choice, batch_dims=1)


def _divisor(chosen):
  return tf.reduce_sum(chosen, -1, keepdims=True) + _SMALLEST_SUM


@fused
def _gates(p, choice, mixer):
  found = _select(p, choice)
  if mixer.normalizes:
    found /= _divisor(found)
  return found * mixer.scale


def _is_chosen(choice, count):
  # Yields, for the first choice of all tokens, then the second and so on,
  # whether it is expert e: [tokens, experts] bool.
  experts = tf.range(count)
  for each in tf.unstack(choice, axis=1):
    yield tf.equal(each[:, tf.newaxis], experts)


@fused
def _counts(choice, count):
  found = (tf.cast(x, tf.float32) for x in _is_chosen(choice, count))
  return tf.reduce_sum(sum(found), 0)


@fused
def _product_gradient(z, p, choice, dgates, load, mixer, balance, z_loss):
  # Returns the gradient of z, [tokens, experts] float32.
  dgates *= mixer.scale
  if mixer.normalizes:
    chosen = _select(p, choice)
    total = _divisor(chosen)
    mean = tf.reduce_sum(dgates * chosen, -1, keepdims=True) / total
    dgates = (dgates - mean) / total
  dp = balance * mixer.count * load + tf.zeros_like(p)
  for i, is_chosen in enumerate(_is_chosen(choice, mixer.count)):
    dp += tf.where_v2(is_chosen, dgates[:, i : i + 1], 0.0)
  if mixer.router == "sigmoid":
    dz = dp * p * (1.0 - p)
  else:
    dz = p * (dp - tf.reduce_sum(dp * p, -1, keepdims=True))
  if z_loss:
    log_z = tf.reduce_logsumexp(z, -1, keepdims=True)
    dz += 2.0 * z_loss * log_z * tf.nn.softmax(z)
  return dz


def within_capacity(choice: tf.Tensor, mixer: Experts) -> tf.Tensor:
  """Replaces choices beyond an expert's capacity by -1.

  `choice` has the numbers of experts, [batch, length, chosen] int32. In each
  sequence, an expert takes first choices before second ones, and earlier tokens
  before later ones (Lepikhin et al. 2021, algorithm 1).
  """
  batch, length, chosen = choice.shape
  capacity = mixer.capacity(length)
  if capacity >= length:
    return choice
  in_order = tf.reshape(tf.transpose(choice, [0, 2, 1]), [batch, -1])
  taken = tf.cast(
    tf.equal(in_order[..., tf.newaxis], tf.range(mixer.count)), tf.int32
  )
  before = tf.cumsum(taken, 1, exclusive=True)
  place = tf.gather(before, in_order, batch_dims=2)
  kept = tf.where_v2(place < capacity, in_order, -1)
  return tf.transpose(tf.reshape(kept, [batch, chosen, length]), [0, 2, 1])


def _choose(x, kernel, bias, mixer):
  # Returns z, p and chosen, which the module's docstring defines. `bias` has at
  # most one tensor.
  z = _products(x, kernel)
  p = _probabilities(z, mixer.router)
  # Of equal scores, tf.math.top_k takes the one of the lower expert.
  _, choice = tf.math.top_k(p + sum(bias), mixer.per_token)
  return z, p, choice


def choose(
  x: tf.Tensor, kernel: tf.Tensor, bias: Sequence[tf.Tensor], mixer: Experts
) -> tuple[tf.Tensor, tf.Tensor]:
  """Chooses experts for each token, without a capacity.

  Args:
    x: [..., d_model], any float dtype.
    kernel: [d_model, router], float32.
    bias: one tensor, [router] float32, if `mixer.has_bias`; otherwise ().
    mixer: settings of the experts.

  Returns:
    Gates, float32, and numbers of experts, int32; [tokens, chosen] both.
  """
  _, p, choice = _choose(x, kernel, bias, mixer)
  return _gates(p, choice, mixer), choice


def route(
  x: mtf.Tensor,
  kernel: mtf.Tensor,
  states: Sequence[mtf.Tensor],
  mixer: Experts,
  loss: LossConfig,
) -> tuple[mtf.Tensor, mtf.Tensor]:
  """Chooses experts for each token.

  Args:
    x: [batch, length, d_model], activation dtype.
    kernel: [d_model, router], float32.
    states: parameters `mixer.states`, [router] float32 each. In place of their
      gradients, the backward pass returns how many tokens chose each expert.
    mixer: settings of the experts.
    loss: weights of the terms of the loss that the module's docstring defines.

  Returns:
    The factors of the experts' results, float32, and the numbers of the
    experts, int32; -1 for an expert that is full. Both are [batch, length,
    chosen]; `chosen` counts from the highest score.
  """
  chosen = mtf.Dimension("chosen", mixer.per_token)
  shape = mtf.Shape([*x.shape.dims[:2], chosen])

  def forward(x, kernel, unused_load, *bias):
    gates, choice = choose(x, kernel, bias, mixer)
    sizes = [*x.shape[:2], mixer.per_token]
    choice = tf.reshape(choice, sizes)
    return tf.reshape(gates, sizes), within_capacity(choice, mixer)

  def backward(x, kernel, dgates, load, *bias):
    z, p, choice = _choose(x, kernel, bias, mixer)
    dz = _product_gradient(
      *(z, p, choice, _rows(dgates), load, mixer),
      loss.balance_loss if mixer.router == "softmax" else 0.0,
      loss.router_z_loss,
    )
    dx = matmul(dz, kernel, transpose_b=True, is_exact=True)
    dkernel = matmul(_rows(x), dz, transpose_a=True, is_exact=True)
    dx = tf.cast(tf.reshape(dx, x.shape), x.dtype)
    return dx, dkernel, _counts(choice, mixer.count)

  def gradient(op, dgates, unused_dchoice):
    x, kernel, *states = op.inputs
    dx, dkernel, counts = WholeSlice(
      backward,
      [recompute(x, dgates), recompute(kernel, dgates), dgates, *states],
      [(y.shape, y.dtype) for y in (x, kernel, states[0])],
      splittable=["batch"],
      name="route_gradient",
    ).outputs
    # Both states get the same tensor, so that devices all-reduce it only once.
    return [dx, dkernel, *(counts for _ in states)]

  return WholeSlice(
    forward,
    [x, kernel, *states],
    [(shape, tf.float32), (shape, tf.int32)],
    splittable=["batch"],
    gradient=gradient,
    name="route",
  ).outputs
