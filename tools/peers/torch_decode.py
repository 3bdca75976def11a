# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Decodes a PaLM in PyTorch; a turn is a continuation of all prompts.

python torch_decode.py --dtype bfloat16 --batch_size 1
"""

# This is what a PyTorch user would write for speed: the products of a block
# that share an input are joined, keys and values are kept in preallocated
# tensors, attention is PyTorch's, and weights are stored in the dtype of the
# products. Needs only torch. tools/bench starts it.

import time

import torch
from arguments import make_parser
from torch.nn import functional
from turns import take_turns

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Model:
  """Weights, and the forward pass with a key/value cache."""

  def __init__(self, sizes):
    d, heads = sizes.d_model, sizes.num_heads * sizes.d_kv
    self.sizes = sizes
    self.dtype = DTYPES[sizes.dtype]
    self.widths = [heads, sizes.d_kv, sizes.d_kv, sizes.d_ff, sizes.d_ff]

    def weight(outer, inner):
      return (torch.randn(outer, inner) / inner**0.5).to(self.dtype)

    self.embedding = torch.randn(sizes.vocab_size, d).to(self.dtype)
    self.blocks = [
      {
        "into": weight(sum(self.widths), d),
        "o": weight(d, heads),
        "wo": weight(d, sizes.d_ff),
        "scale": torch.ones(d, dtype=self.dtype),
      }
      for _ in range(sizes.num_layers)
    ]
    self.scale = torch.ones(d, dtype=self.dtype)
    pair = torch.arange(sizes.d_kv // 2)
    angle = torch.outer(
      torch.arange(sizes.sequence_length), 1e4 ** (-2.0 * pair / sizes.d_kv)
    )
    self.sin, self.cos = angle.sin().to(self.dtype), angle.cos().to(self.dtype)

  def num_parameters(self) -> int:
    """Returns the number of parameters, including norm scales."""
    tensors = [self.embedding, self.scale]
    tensors += [each for block in self.blocks for each in block.values()]
    return sum(each.numel() for each in tensors)

  def caches(self):
    """Returns empty keys and values of every layer."""
    # Each [batch, 1 head, sequence_length, d_kv].
    sizes = self.sizes
    shape = sizes.batch_size, 1, sizes.sequence_length, sizes.d_kv
    return [
      [torch.zeros(shape, dtype=self.dtype) for _ in range(2)]
      for _ in self.blocks
    ]

  def norm(self, x, scale):
    """Returns the LayerNorm of x."""
    return functional.layer_norm(x, x.shape[-1:], scale, eps=1e-6)

  def next_logits(self, tokens, caches, start):
    """Returns logits of the token after `tokens` [batch, length]."""
    # Positions of the tokens are start, start + 1, ...; the caches hold earlier
    # positions, and the new ones are added.
    heads, length = self.sizes.num_heads, tokens.shape[1]
    end = start + length
    sin, cos = self.sin[start:end], self.cos[start:end]

    def turn(x):
      a, b = x.chunk(2, -1)
      return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    x = self.embedding[tokens]
    for block, (keys, values) in zip(self.blocks, caches, strict=True):
      y = functional.linear(self.norm(x, block["scale"]), block["into"])
      q, k, v, gate, up = y.split(self.widths, -1)
      q = turn(q.unflatten(-1, (heads, -1)).transpose(1, 2))
      keys[:, 0, start:end], values[:, 0, start:end] = turn(k), v
      out = functional.scaled_dot_product_attention(
        q,
        keys[:, :, :end].expand(-1, heads, -1, -1),
        values[:, :, :end].expand(-1, heads, -1, -1),
        is_causal=length > 1,  # one token sees all of the cache
      )
      out = functional.linear(out.transpose(1, 2).flatten(2), block["o"])
      x = x + out + functional.linear(functional.silu(gate) * up, block["wo"])
    y = self.norm(x[:, -1:], self.scale) * x.shape[-1] ** -0.5
    return functional.linear(y, self.embedding)


@torch.inference_mode()
def continuation_secs(sizes, model) -> float:
  """Returns the seconds of a continuation, without reading the prompts."""
  caches = model.caches()
  prompts = torch.randint(
    sizes.vocab_size, (sizes.batch_size, sizes.prompt_tokens)
  )
  token = model.next_logits(prompts, caches, 0).argmax(-1)
  start = time.perf_counter()
  for place in range(sizes.prompt_tokens, sizes.sequence_length - 1):
    token = model.next_logits(token, caches, place).argmax(-1)
  return time.perf_counter() - start


def main() -> None:
  """Takes turns."""
  sizes = make_parser(
    __doc__.splitlines()[0], dtypes=DTYPES, prompt_tokens=64, batch_size=1
  ).parse_args()
  torch.manual_seed(0)
  model = Model(sizes)

  def turn() -> dict[str, float]:
    return {"secs": continuation_secs(sizes, model)}

  turn()
  take_turns(turn, {"parameters": model.num_parameters()})


if __name__ == "__main__":
  main()
