# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a PaLM in PyTorch.

python torch_peer.py --dtype bfloat16 --compile
"""

# This is what a PyTorch user would write for speed: the products of a block
# that share an input are joined, and attention is PyTorch's.
#
# A turn is a step. Autocast casts weights; --compile compiles the loss with its
# gradients, and the step of PaLM's optimizer. It runs on a GPU if PyTorch finds
# one, where float32 products are TF32, as XLA's are. --int8 rounds the operands
# of a block's products, forward and backward, to 8 bits by torchao.
#
# Needs torch; for --int8, torchao. tools/bench starts it.

from collections.abc import Iterable

import torch
from torch.nn import functional

try:
  from torchao.prototype.quantized_training.int8_mixed_precision import (
    Int8MixedPrecisionTrainingConfig,
  )
  from torchao.prototype.quantized_training.int8_mixed_precision import (
    _Int8MixedPrecisionTrainingLinearFunction as _MultiplyInInt8,
  )
except ImportError:  # only --int8 needs it
  pass

WARM_UP_STEPS = 2
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def initial_parameters(sizes):
  """Returns random weights: embedding, a dict per block, and final scale."""
  d, heads_width = sizes.d_model, sizes.num_heads * sizes.d_kv

  def weight(outer, inner, fan_in):
    return torch.randn(outer, inner) / fan_in**0.5

  blocks = [
    {
      "into": weight(sum(widths(sizes)), d, d),
      "o": weight(d, heads_width, heads_width),
      "wo": weight(d, sizes.d_ff, sizes.d_ff),
      "scale": torch.ones(d),
    }
    for _ in range(sizes.num_layers)
  ]
  return {
    "embedding": weight(sizes.vocab_size, d, 1),
    "blocks": blocks,
    "scale": torch.ones(d),
  }


def list_tensors(params) -> list[torch.Tensor]:
  """Returns the tensors of `initial_parameters`."""
  of_blocks = [x for block in params["blocks"] for x in block.values()]
  return [params["embedding"], *of_blocks, params["scale"]]


def widths(sizes) -> list[int]:
  """Returns the widths of the products that share an input."""
  heads_width = sizes.num_heads * sizes.d_kv
  return [heads_width, sizes.d_kv, sizes.d_kv, sizes.d_ff, sizes.d_ff]


def rotary_tables(sizes) -> list[torch.Tensor]:
  """Returns sine and cosine, each [sequence_length, d_kv / 2], float32."""
  pair = torch.arange(sizes.d_kv // 2, dtype=torch.float32)
  place = torch.arange(sizes.sequence_length, dtype=torch.float32)
  angle = torch.outer(place, 10000.0 ** (-2.0 * pair / sizes.d_kv))
  return [angle.sin(), angle.cos()]


def rotate(x: torch.Tensor, tables) -> torch.Tensor:
  """Returns x [..., length, d_kv] with half-split rotary applied."""
  # The tables, and so the products, are float32.
  sine, cosine = tables
  a, b = x.chunk(2, -1)
  return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1).to(
    x.dtype
  )


def norm(x, scale):
  """Returns the LayerNorm of x."""
  return functional.layer_norm(x, x.shape[-1:], scale, eps=1e-6)


def multiply(x, kernel, sizes):
  """Returns x times the transposed kernel of a block."""
  if not sizes.int8:
    return functional.linear(x, kernel)
  return _MultiplyInInt8.apply(
    x.to(DTYPES[sizes.dtype]), kernel, None, Int8MixedPrecisionTrainingConfig()
  )


def parallel_block(x, w, sizes, tables):
  """Returns x + Attention(LayerNorm(x)) + SwiGLU(LayerNorm(x)), multi-query."""
  wide = multiply(norm(x, w["scale"]), w["into"], sizes)
  q, k, v, gate, up = wide.split(widths(sizes), -1)
  q = rotate(q.unflatten(-1, (sizes.num_heads, -1)).transpose(1, 2), tables)
  k, v = rotate(k, tables).unsqueeze(1), v.unsqueeze(1)
  # `expand` repeats the one key/value head without a copy.
  shared = (-1, sizes.num_heads, -1, -1)
  heads = functional.scaled_dot_product_attention(
    q, k.expand(shared), v.expand(shared), is_causal=True
  )
  attended = multiply(heads.transpose(1, 2).flatten(2), w["o"], sizes)
  hidden = functional.silu(gate) * up
  return (x + attended + multiply(hidden, w["wo"], sizes)).to(x.dtype)


def compute_loss(params, inputs, targets, sizes, tables):
  """Returns cross-entropy plus z-loss, both means over all tokens."""
  x = functional.embedding(inputs, params["embedding"]).to(DTYPES[sizes.dtype])
  for w in params["blocks"]:
    x = parallel_block(x, w, sizes, tables)
  # The embedding is tied, and logits are scaled (PaLM, section 2).
  x = norm(x, params["scale"]) * x.shape[-1] ** -0.5
  logits = functional.linear(x, params["embedding"]).float()
  log_z = logits.logsumexp(-1)
  target = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
  return (log_z - target + 1e-4 * log_z.square()).mean()


# PaLM's optimizer, written from the papers (PaLM, section 5; Shazeer and Stern
# 2018): Adafactor without factorization, momentum 0.9, beta2 = 1 - k^-0.8,
# updates and gradients clipped at 1, lr = min(0.01, 1 / sqrt(k)), weights
# decayed by lr^2.


def _root_mean_square(x):
  return x.square().mean().sqrt()


def _step(parameters, mean_squares, momenta, beta2, learning_rate):
  gradients = [p.grad for p in parameters]
  norm = sum(g.square().sum() for g in gradients).sqrt().clamp(min=1.0)
  for p, g, v, m in zip(
    parameters, gradients, mean_squares, momenta, strict=True
  ):
    g = g / norm
    v.mul_(beta2).add_((1 - beta2) * (g.square() + 1e-30))
    update = g * v.rsqrt()
    update = update / _root_mean_square(update).clamp(min=1.0)
    size = _root_mean_square(p).clamp(min=1e-3)
    m.mul_(0.9).add_(0.1 * learning_rate * size * update)
    p.sub_(learning_rate.square() * p + m)


class Adafactor:
  """Parameters, their mean squares and momenta."""

  def __init__(
    self, parameters: Iterable[torch.Tensor], *, compiled: bool = False
  ):
    """Starts at zero; `compiled` compiles the function of a step."""
    self.parameters = list(parameters)
    self.mean_squares, self.momenta = (
      [torch.zeros_like(p) for p in self.parameters] for _ in range(2)
    )
    self.num_steps = 0
    self._step = torch.compile(_step) if compiled else _step

  @torch.no_grad()
  def step(self) -> None:
    """Takes a step with the parameters' gradients, and clears them."""
    self.num_steps = k = self.num_steps + 1
    # Use tensors, because numbers would be compiled into the step, which would
    # be compiled again for each new number.
    numbers = [1 - k**-0.8, min(0.01, k**-0.5)]
    first = self.parameters[0]
    like = {"dtype": first.dtype, "device": first.device}
    self._step(
      self.parameters,
      self.mean_squares,
      self.momenta,
      *(torch.tensor(x, **like) for x in numbers),
    )
    for p in self.parameters:
      p.grad = None


def train(sizes) -> None:
  """Takes turns: a step on one random batch each."""
  if torch.cuda.is_available():
    torch.set_default_device("cuda")
    torch.set_float32_matmul_precision("high")
  torch.manual_seed(0)
  params, tables = initial_parameters(sizes), rotary_tables(sizes)
  tensors = list_tensors(params)
  for x in tensors:
    x.requires_grad_()
  shape = sizes.batch_size, sizes.sequence_length
  targets = torch.randint(sizes.vocab_size, shape)
  inputs = functional.pad(targets[:, :-1], (1, 0))
  optimizer = Adafactor(tensors, compiled=sizes.compile)
  evaluate_loss = torch.compile(compute_loss) if sizes.compile else compute_loss

  def step() -> dict[str, float]:
    with torch.autocast(
      targets.device.type, DTYPES[sizes.dtype], enabled=sizes.dtype != "float32"
    ):
      loss = evaluate_loss(params, inputs, targets, sizes, tables)
    loss.backward()
    optimizer.step()
    return {"loss": loss.item()}  # waits for the step

  for _ in range(WARM_UP_STEPS):
    step()
  take_turns(step, {"parameters": sum(x.numel() for x in tensors)})


def main() -> None:
  """Trains."""
  parser = make_parser(__doc__.splitlines()[0], DTYPES)
  parser.add_argument("--compile", action="store_true")
  parser.add_argument("--int8", action="store_true")
  train(parser.parse_args())


if __name__ == "__main__":
  # The name exists only if this file is a program; a test imports Adafactor.
  from turns import make_parser, take_turns

  main()
