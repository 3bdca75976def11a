# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a PaLM in JAX under jit.

python jax_peer.py --dtype float32
"""

# This is what a JAX user would write for speed. A turn is one jitted step with
# donated buffers, which includes PaLM's optimizer. Needs only jax. tools/bench
# starts it.

import functools
import itertools

import jax
import jax.numpy as jnp

WARM_UP_TURNS = 2


def initial_parameters(sizes, key):
  """Returns float32 weights: embedding, a dict per block, and final scale."""
  d, heads, d_kv = sizes.d_model, sizes.num_heads, sizes.d_kv
  shapes_and_fan_ins = {
    "q": ((d, heads, d_kv), d),
    "k": ((d, d_kv), d),
    "v": ((d, d_kv), d),
    "o": ((heads, d_kv, d), heads * d_kv),
    "gate": ((d, sizes.d_ff), d),
    "up": ((d, sizes.d_ff), d),
    "down": ((sizes.d_ff, d), sizes.d_ff),
  }
  blocks = []
  for layer in range(sizes.num_layers):
    block = {"scale": jnp.ones(d)}
    keys = jax.random.split(jax.random.fold_in(key, layer), 7)
    for name, name_key in zip(shapes_and_fan_ins, keys, strict=True):
      shape, fan_in = shapes_and_fan_ins[name]
      block[name] = jax.random.normal(name_key, shape) / fan_in**0.5
    blocks.append(block)
  embedding = jax.random.normal(key, (sizes.vocab_size, d))
  return {"embedding": embedding, "blocks": blocks, "scale": jnp.ones(d)}


def layer_norm(x, scale):
  """Returns x with mean 0 and variance 1, scaled; computed in float32."""
  wide = x.astype(jnp.float32)
  normed = jax.nn.standardize(wide, axis=-1, epsilon=1e-6)
  return (normed * scale).astype(x.dtype)


def rotate(x, place):
  """Returns x [batch, length, ..., d_kv] with half-split rotary applied."""
  pair = jnp.arange(x.shape[-1] // 2)
  angle = jnp.outer(place, 10000.0 ** (-2.0 * pair / x.shape[-1]))
  # If x has heads, all heads share the angles.
  angle = angle.reshape(angle.shape[0], *[1] * (x.ndim - 3), angle.shape[1])
  sine, cosine = jnp.sin(angle), jnp.cos(angle)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = first * cosine - second * sine, second * cosine + first * sine
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def parallel_block(x, block):
  """Returns x + Attention(LayerNorm(x)) + SwiGLU(LayerNorm(x)), multi-query.

  Args:
    x: array, [batch, length, d_model].
    block: weights of the block.
  """
  place = jnp.arange(x.shape[1])
  # As in PaLM, weights are float32 and are cast where they are used.
  w = {name: weight.astype(x.dtype) for name, weight in block.items()}
  y = layer_norm(x, block["scale"])
  q = rotate(jnp.einsum("bld,dhk->blhk", y, w["q"]), place)
  k, v = rotate(y @ w["k"], place), y @ w["v"]
  scores = jnp.einsum("blhk,bmk->bhlm", q * q.shape[-1] ** -0.5, k)
  visible = place <= place[:, None]
  scores = jnp.where(visible, scores.astype(jnp.float32), -1e9)
  weights = jax.nn.softmax(scores).astype(x.dtype)
  heads = jnp.einsum("bhlm,bmk->blhk", weights, v)
  hidden = jax.nn.silu(y @ w["gate"]) * (y @ w["up"])
  return x + jnp.einsum("blhk,hkd->bld", heads, w["o"]) + hidden @ w["down"]


def compute_loss(params, inputs, targets, sizes):
  """Returns cross-entropy plus z-loss, both means over all tokens."""
  embedding = params["embedding"].astype(sizes.dtype)
  x = embedding[inputs]
  for block in params["blocks"]:
    x = parallel_block(x, block)
  # The embedding is tied, and logits are scaled (PaLM, section 2).
  x = layer_norm(x, params["scale"]) * x.shape[-1] ** -0.5
  logits = (x @ embedding.T).astype(jnp.float32)
  log_z = jax.nn.logsumexp(logits, axis=-1)
  target = jnp.take_along_axis(logits, targets[..., None], axis=-1)
  return jnp.mean(log_z - target[..., 0] + 1e-4 * log_z**2)


# PaLM's optimizer, written from the papers (PaLM, section 5; Shazeer and Stern
# 2018) for any tree of arrays: Adafactor without factorization, momentum 0.9,
# beta2 = 1 - k^-0.8, updates and gradients clipped at 1,
# lr = min(0.01, 1 / sqrt(k)), weights decayed by lr^2.


def adafactor_init(params):
  """Returns the mean squares and the momenta before the first step."""
  return {
    name: jax.tree.map(jnp.zeros_like, params)
    for name in ("mean_squares", "momenta")
  }


def adafactor_schedule(k: int) -> tuple[float, float]:
  """Returns beta2 and the learning rate of step k = 1, 2, ..."""
  return 1.0 - k**-0.8, min(0.01, k**-0.5)


def adafactor_step(params, state, gradients, beta2, learning_rate):
  """Returns parameters and state after one step.

  Args:
    params: tree of float32 arrays.
    state: state that `adafactor_init` or the previous step returned.
    gradients: tree with the structure of `params`.
    beta2: decay of the mean squares in this step.
    learning_rate: learning rate of this step.
  """
  leaves = jax.tree.leaves(gradients)
  norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in leaves))
  gradients = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), gradients)
  mean_squares = jax.tree.map(
    lambda v, g: beta2 * v + (1.0 - beta2) * (g * g + 1e-30),
    state["mean_squares"],
    gradients,
  )

  def momentum(m, p, g, v):
    # One array is one variable. Its update is clipped, and scaled by the root
    # mean square of the array.
    update = g / jnp.sqrt(v)
    update /= jnp.maximum(1.0, jnp.sqrt(jnp.mean(update**2)))
    size = jnp.maximum(1e-3, jnp.sqrt(jnp.mean(p**2)))
    return 0.9 * m + 0.1 * learning_rate * size * update

  momenta = jax.tree.map(
    momentum, state["momenta"], params, gradients, mean_squares
  )
  params = jax.tree.map(
    lambda p, m: p - learning_rate**2 * p - m, params, momenta
  )
  return params, {"mean_squares": mean_squares, "momenta": momenta}


def train(sizes, params):
  """Returns a function that takes a step on one random batch."""
  shape = sizes.batch_size, sizes.sequence_length
  targets = jax.random.randint(jax.random.key(1), shape, 0, sizes.vocab_size)
  inputs = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)))

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def updated(params, state, *schedule):
    loss, gradients = jax.value_and_grad(compute_loss)(
      params, inputs, targets, sizes
    )
    return *adafactor_step(params, state, gradients, *schedule), loss

  state, numbers = adafactor_init(params), itertools.count(1)

  def step() -> dict[str, float]:
    nonlocal params, state
    schedule = adafactor_schedule(next(numbers))
    params, state, loss = updated(params, state, *schedule)
    # JAX returns before the step has ended.
    jax.block_until_ready(params)
    return {"loss": float(loss)}

  return step


def main() -> None:
  """Takes turns."""
  # Imported here, because the name exists only if this file is a program, and
  # tests import the model.
  from turns import make_parser, take_turns

  parser = make_parser(__doc__.splitlines()[0], ["float32", "bfloat16"])
  sizes = parser.parse_args()
  params = initial_parameters(sizes, jax.random.key(0))
  num_parameters = sum(w.size for w in jax.tree.leaves(params))
  turn = train(sizes, params)
  for _ in range(WARM_UP_TURNS):
    turn()
  take_turns(turn, {"parameters": num_parameters})


if __name__ == "__main__":
  main()
