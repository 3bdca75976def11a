# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a PaLM in JAX under jit; a turn is a step.

python jax_palm.py --dtype float32
"""

# This is what a JAX user would write for speed: one jitted step with donated
# buffers, which includes PaLM's optimizer. Needs only jax. tools/bench starts
# it.

import functools
import itertools

import jax
import jax.numpy as jnp

WARM_UP_STEPS = 2


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


def rotate(x, angle):
  """Returns x [batch, length, ..., d_kv] with half-split rotary applied."""
  # angle is [length, d_kv / 2]. If x has heads, all heads share it.
  angle = angle.reshape(angle.shape[0], *[1] * (x.ndim - 3), angle.shape[1])
  sine, cosine = jnp.sin(angle), jnp.cos(angle)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = first * cosine - second * sine, second * cosine + first * sine
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def parallel_block(x, block, angle):
  """Returns x + Attention(LayerNorm(x)) + SwiGLU(LayerNorm(x)), multi-query."""
  # As in PaLM, weights are float32 and are cast where they are used.
  w = {name: weight.astype(x.dtype) for name, weight in block.items()}
  y = layer_norm(x, block["scale"])
  q = rotate(jnp.einsum("bld,dhk->blhk", y, w["q"]), angle)
  k, v = rotate(y @ w["k"], angle), y @ w["v"]
  scores = jnp.einsum("blhk,bmk->bhlm", q * q.shape[-1] ** -0.5, k)
  visible = jnp.tri(x.shape[1], dtype=bool)
  scores = jnp.where(visible, scores.astype(jnp.float32), -1e9)
  weights = jax.nn.softmax(scores).astype(x.dtype)
  heads = jnp.einsum("bhlm,bmk->blhk", weights, v)
  hidden = jax.nn.silu(y @ w["gate"]) * (y @ w["up"])
  return x + jnp.einsum("blhk,hkd->bld", heads, w["o"]) + hidden @ w["down"]


def compute_loss(params, inputs, targets, sizes):
  """Returns cross-entropy plus z-loss, both means over all tokens."""
  embedding = params["embedding"].astype(sizes.dtype)
  pair = jnp.arange(sizes.d_kv // 2)
  frequency = 10000.0 ** (-2.0 * pair / sizes.d_kv)
  angle = jnp.outer(jnp.arange(inputs.shape[1]), frequency)
  x = embedding[inputs]
  for block in params["blocks"]:
    x = parallel_block(x, block, angle)
  # The embedding is tied, and logits are scaled (PaLM, section 2).
  x = layer_norm(x, params["scale"]) * sizes.d_model**-0.5
  logits = (x @ embedding.T).astype(jnp.float32)
  log_z = jax.nn.logsumexp(logits, axis=-1)
  target = jnp.take_along_axis(logits, targets[..., None], axis=-1)
  return jnp.mean(log_z - target[..., 0] + 1e-4 * log_z**2)


def make_step(sizes, params):
  """Returns a function that takes a step on one random batch."""
  import jax_adafactor  # in this folder, see `main`

  shape = sizes.batch_size, sizes.sequence_length
  targets = jax.random.randint(jax.random.key(1), shape, 0, sizes.vocab_size)
  inputs = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)))

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def updated(params, state, *schedule):
    loss, gradients = jax.value_and_grad(compute_loss)(
      params, inputs, targets, sizes
    )
    return *jax_adafactor.step(params, state, gradients, *schedule), loss

  state, numbers = jax_adafactor.init(params), itertools.count(1)

  def step() -> dict[str, float]:
    nonlocal params, state
    schedule = jax_adafactor.schedule(next(numbers))
    params, state, loss = updated(params, state, *schedule)
    # JAX returns before the step has ended.
    jax.block_until_ready(params)
    return {"loss": float(loss)}

  return step


def main() -> None:
  """Takes turns."""
  # Imported here, because these names exist only if this file is a program, and
  # tools/parity.py imports the model.
  from arguments import make_parser
  from turns import take_turns

  sizes = make_parser(
    __doc__.splitlines()[0], dtypes=["float32", "bfloat16"], batch_size=8
  ).parse_args()
  params = initial_parameters(sizes, jax.random.key(0))
  num_parameters = sum(w.size for w in jax.tree.leaves(params))
  step = make_step(sizes, params)
  for _ in range(WARM_UP_STEPS):
    step()
  take_turns(step, {"parameters": num_parameters})


if __name__ == "__main__":
  main()
