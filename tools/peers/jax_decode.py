# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Decodes a PaLM in JAX under jit; a turn is a continuation of all prompts.

python jax_decode.py --dtype float32 --batch_size 1
"""

# This is what a JAX user would write for speed: the loop over tokens is one
# jitted scan over keys and values that are updated in place, and weights are
# stored in the dtype of the products. Needs only jax. tools/bench starts it.

import time

import jax
import jax.numpy as jnp
from arguments import make_parser
from jax_palm import initial_parameters, layer_norm, rotate
from turns import take_turns


def next_logits(sizes, params, tokens, caches, start):
  """Returns the logits after `tokens`, and the updated caches."""
  # tokens: [batch, length], from position `start` on. caches: keys and values
  # of each layer, [batch, sequence_length, d_kv], one head for all queries.
  place = start + jnp.arange(tokens.shape[1])
  pair = jnp.arange(sizes.d_kv // 2)
  angle = jnp.outer(place, 10000.0 ** (-2.0 * pair / sizes.d_kv))
  visible = jnp.arange(sizes.sequence_length) <= place[:, None]
  x, after = params["embedding"][tokens], []
  for w, (keys, values) in zip(params["blocks"], caches, strict=True):
    y = layer_norm(x, w["scale"])
    q = rotate(jnp.einsum("bld,dhk->blhk", y, w["q"]), angle)
    # XLA updates an array in place if nothing else holds it.
    put = jax.lax.dynamic_update_slice
    keys = put(keys, rotate(y @ w["k"], angle), (0, start, 0))
    values = put(values, y @ w["v"], (0, start, 0))
    after.append((keys, values))
    scores = jnp.einsum("blhk,bmk->bhlm", q * q.shape[-1] ** -0.5, keys)
    scores = jnp.where(visible, scores.astype(jnp.float32), -1e9)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    heads = jnp.einsum("bhlm,bmk->blhk", weights, values)
    hidden = jax.nn.silu(y @ w["gate"]) * (y @ w["up"])
    x = x + jnp.einsum("blhk,hkd->bld", heads, w["o"]) + hidden @ w["down"]
  # For a prompt, only the logits of its last position are needed.
  y = layer_norm(x[:, -1:], params["scale"]) * sizes.d_model**-0.5
  return y @ params["embedding"].T, after


def make_decoder(sizes, params):
  """Returns a function that times a continuation, in seconds."""
  count = sizes.sequence_length - sizes.prompt_tokens - 1
  shape = sizes.batch_size, sizes.sequence_length, sizes.d_kv

  @jax.jit
  def prefill(params, tokens):
    caches = [
      (jnp.zeros(shape, sizes.dtype), jnp.zeros(shape, sizes.dtype))
      for _ in range(sizes.num_layers)
    ]
    logits, caches = next_logits(sizes, params, tokens, caches, 0)
    return logits.argmax(-1), caches

  @jax.jit
  def continue_texts(params, token, caches):
    def step(carry, place):
      logits, caches = next_logits(sizes, params, *carry, place)
      return (logits.argmax(-1), caches), None

    places = sizes.prompt_tokens + jnp.arange(count)
    return jax.lax.scan(step, (token, caches), places)[0]

  tokens = jax.random.randint(
    jax.random.key(1), [sizes.batch_size, sizes.prompt_tokens], 0, 256
  )

  def continuation_secs() -> float:
    # Reading the prompt is not timed.
    first = jax.block_until_ready(prefill(params, tokens))
    start = time.perf_counter()
    jax.block_until_ready(continue_texts(params, *first))
    return time.perf_counter() - start

  return continuation_secs


def main() -> None:
  """Takes turns."""
  sizes = make_parser(
    __doc__.splitlines()[0],
    dtypes=["float32", "bfloat16"],
    prompt_tokens=64,
    batch_size=1,
  ).parse_args()
  params = initial_parameters(sizes, jax.random.key(0))
  num_parameters = sum(w.size for w in jax.tree.leaves(params))
  params = jax.tree.map(lambda w: w.astype(sizes.dtype), params)
  continuation_secs = make_decoder(sizes, params)

  def turn() -> dict[str, float]:
    return {"secs": continuation_secs()}

  turn()  # compiles
  take_turns(turn, {"parameters": num_parameters})


if __name__ == "__main__":
  main()
