# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N803, N806 (names end in the letters of their axes)
"""A second implementation of PaLM's loss, in float64 JAX, with gradients.

It is written for one sequence and mapped over the batch, with rotary embedding
as a product of complex numbers, so that it shares no formula with oracle.py.
oracle_test.py proves that both agree. The letters in names and the arguments
are as in oracle.py. Everything runs inside `jax.enable_x64`, which does not
change the precision of other JAX code in the process.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def _norm(config, x_LD, scale_D):
  if config.norm == "layer_norm":
    return jax.nn.standardize(x_LD, axis=-1, epsilon=1e-6) * scale_D
  mean_square_L1 = jnp.square(x_LD).mean(-1, keepdims=True)
  return x_LD * jax.lax.rsqrt(mean_square_L1 + 1e-6) * scale_D


def _turn(x_LK):
  """Rotary embedding: numbers i and i + K/2 are one complex number."""
  length, d_kv = x_LK.shape
  real, imaginary = jnp.split(x_LK, 2, axis=-1)
  frequency_K = jnp.exp(-2.0 * jnp.arange(d_kv // 2) / d_kv * jnp.log(1e4))
  angle_LK = jnp.outer(jnp.arange(length), frequency_K)
  turned = jax.lax.complex(real, imaginary) * jnp.exp(1j * angle_LK)
  return jnp.concatenate([turned.real, turned.imag], axis=-1)


def _one_head(x_LD, segments_L, prefix_L, w_q_DK, w_k_DK, w_v_DK, w_o_KD):
  q_LK, k_MK = _turn(x_LD @ w_q_DK), _turn(x_LD @ w_k_DK)
  scores_LM = q_LK @ k_MK.T * w_q_DK.shape[-1] ** -0.5
  past_LM = jnp.tril(jnp.ones_like(scores_LM, dtype=bool))
  apart_LM = jnp.subtract(*jnp.meshgrid(segments_L, segments_L)) != 0
  seen_LM = jnp.logical_or(past_LM, prefix_L) & ~apart_LM
  weights_LM = jax.nn.softmax(scores_LM, axis=-1, where=seen_LM)
  return weights_LM @ (x_LD @ w_v_DK) @ w_o_KD


def _attention(config, weight, x_LD, segments_L, prefix_L):
  memory_axis = None if config.attention == "multi_query" else 1
  axes = (None, None, None, 1, memory_axis, memory_axis, 0)
  kernels = (weight[f"attention/{name}"] for name in "qkvo")
  heads = jax.vmap(_one_head, in_axes=axes)
  return heads(x_LD, segments_L, prefix_L, *kernels).sum(0)


def _mlp(weight, x_LD):
  gate_LF = jax.nn.silu(x_LD @ weight["mlp/wi_gate"])
  return (gate_LF * (x_LD @ weight["mlp/wi"])) @ weight["mlp/wo"]


def _sequence_logits(config, params, inputs_L, segments_L, prefix_L):
  x_LD = jnp.take(params["embedding"], inputs_L, axis=0)
  for index in range(config.num_layers):
    prefix = f"layer_{index:03d}/"
    weight = {
      name.removeprefix(prefix): value
      for name, value in params.items()
      if name.startswith(prefix)
    }
    y_LD = _norm(config, x_LD, weight["norm/scale"])
    attended_LD = x_LD + _attention(config, weight, y_LD, segments_L, prefix_L)
    if config.block == "serial":
      y_LD = _norm(config, attended_LD, weight["mlp_norm/scale"])
    x_LD = attended_LD + _mlp(weight, y_LD)
  x_LD = _norm(config, x_LD, params.get("final_norm/scale", 1.0))
  return jnp.einsum("LD,VD->LV", x_LD, params["embedding"]) * (
    config.d_model**-0.5
  )


def _loss(
  params, config, inputs, targets, z_loss, segments, loss_weights, prefix
):
  dtype = params["embedding"].dtype

  def terms(inputs_L, targets_L, *masks):
    logits_LV = _sequence_logits(config, params, inputs_L, *masks)
    chosen_LV = jax.nn.one_hot(targets_L, config.vocab_size, dtype=dtype)
    log_p_L = jnp.sum(jax.nn.log_softmax(logits_LV) * chosen_LV, axis=-1)
    log_z_L = jax.nn.logsumexp(logits_LV, axis=-1)
    return logits_LV, -log_p_L, z_loss * log_z_L**2

  logits_BLV, *each_BL = jax.vmap(terms)(inputs, targets, segments, prefix)
  cross_entropy, z_term = (
    jnp.average(term_BL, weights=loss_weights) for term_BL in each_BL
  )
  return cross_entropy + z_term, (logits_BLV, cross_entropy, z_term)


@functools.partial(jax.jit, static_argnames="config")
def _compiled(params, config, *arrays):
  """Compiles all at once, which is faster than one operation at a time."""
  return jax.value_and_grad(_loss, has_aux=True)(params, config, *arrays)


def _run(config, params, inputs, targets, z_loss, segments, weights, prefix):
  zeros = np.zeros_like(inputs)
  segments, prefix = (zeros if x is None else x for x in (segments, prefix))
  weights = np.ones(inputs.shape) if weights is None else np.float64(weights)
  arrays = inputs, targets, np.float64(z_loss), segments, weights, prefix
  with jax.enable_x64(True):
    (_, aux), gradients = _compiled(
      {n: jnp.asarray(p, dtype=jnp.float64) for n, p in params.items()},
      config,
      *map(jnp.asarray, arrays),
    )
    return jax.tree.map(np.asarray, (*aux, gradients))


def forward(config, params, inputs, segments=None, prefix=None) -> np.ndarray:
  """Returns oracle.forward, the logits [B, L, V] in float64."""
  targets = np.zeros_like(inputs)
  return _run(config, params, inputs, targets, 0.0, segments, None, prefix)[0]


def loss_and_gradients(
  config,
  params,
  inputs,
  targets,
  z_loss: float,
  segments=None,
  loss_weights=None,
  prefix=None,
):
  """Returns oracle.loss and the gradients of the sum of its two terms.

  Returns:
    (loss, z_loss, gradients): two floats, and a dict from each variable's name
    to a float64 array of its shape.
  """
  _, cross_entropy, z_term, gradients = _run(
    config, params, inputs, targets, z_loss, segments, loss_weights, prefix
  )
  return float(cross_entropy), float(z_term), gradients
