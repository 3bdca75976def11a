# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a PaLM in PyTorch; a turn is a step.

python torch_palm.py --dtype bfloat16 --compile
"""

# This is what a PyTorch user would write for speed: the five products of a
# block that share an input are joined, attention is PyTorch's, and autocast
# casts weights. --compile compiles the loss with its gradients, and the step of
# PaLM's optimizer. It runs on a GPU if PyTorch finds one, where float32
# products are TF32, as XLA's are. Needs only torch. tools/bench starts it.

import torch
from arguments import make_parser
from torch import nn
from torch.nn import functional
from torch_adafactor import Adafactor
from turns import take_turns

WARM_UP_STEPS = 2
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def random_weight(*shape: int, fan_in: int) -> nn.Parameter:
  """Returns a normally distributed parameter with variance 1 / fan_in."""
  return nn.Parameter(torch.randn(shape) / fan_in**0.5)


def rotary_tables(length: int, d_kv: int) -> tuple[torch.Tensor, torch.Tensor]:
  """Returns sine and cosine, each [length, d_kv / 2], float32."""
  pair = torch.arange(d_kv // 2, dtype=torch.float32)
  frequency = 10000.0 ** (-2.0 * pair / d_kv)
  angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency)
  return angle.sin(), angle.cos()


def turn(x: torch.Tensor, tables) -> torch.Tensor:
  """Returns x [batch, heads, length, d_kv] with half-split rotary applied."""
  sine, cosine = tables
  first, second = x.float().tensor_split(2, dim=-1)
  turned = (
    first * cosine - second * sine,
    second * cosine + first * sine,
  )
  return torch.cat(turned, dim=-1).to(x.dtype)


class ParallelBlock(nn.Module):
  """Block x + Attention(LayerNorm(x)) + SwiGLU(LayerNorm(x)), multi-query."""

  def __init__(self, sizes):
    super().__init__()
    d_model, heads_width = sizes.d_model, sizes.num_heads * sizes.d_kv
    self.num_heads = sizes.num_heads
    self.widths = (heads_width, sizes.d_kv, sizes.d_kv, sizes.d_ff, sizes.d_ff)
    self.scale = nn.Parameter(torch.ones(d_model))
    self.into = random_weight(sum(self.widths), d_model, fan_in=d_model)
    self.o = random_weight(d_model, heads_width, fan_in=heads_width)
    self.wo = random_weight(d_model, sizes.d_ff, fan_in=sizes.d_ff)

  def forward(self, x, tables):
    """Returns x [batch, length, d_model] after the block."""
    normed = functional.layer_norm(x, x.shape[-1:], self.scale, eps=1e-6)
    wide = functional.linear(normed, self.into)
    q, k, v, gate, up = wide.split(self.widths, dim=-1)
    q = turn(q.unflatten(-1, (self.num_heads, -1)).transpose(1, 2), tables)
    # `expand` repeats the one key/value head without a copy.
    shared = (-1, self.num_heads, -1, -1)
    k, v = turn(k.unsqueeze(1), tables).expand(shared), v.unsqueeze(1)
    heads = functional.scaled_dot_product_attention(
      q, k, v.expand(shared), is_causal=True
    )
    heads = heads.transpose(1, 2).flatten(2)
    hidden = functional.silu(gate) * up
    attended = functional.linear(heads, self.o)
    return (x + attended + functional.linear(hidden, self.wo)).to(x.dtype)


class Palm(nn.Module):
  """Model: tokens [batch, length] to float32 logits [batch, length, vocab]."""

  def __init__(self, sizes):
    super().__init__()
    self.dtype = DTYPES[sizes.dtype]
    self.embedding = random_weight(sizes.vocab_size, sizes.d_model, fan_in=1)
    self.blocks = nn.ModuleList(
      ParallelBlock(sizes) for _ in range(sizes.num_layers)
    )
    self.scale = nn.Parameter(torch.ones(sizes.d_model))
    sine, cosine = rotary_tables(sizes.sequence_length, sizes.d_kv)
    self.register_buffer("sine", sine)
    self.register_buffer("cosine", cosine)

  def forward(self, inputs):
    """Returns logits scaled by d_model ** -0.5."""
    # The embedding is tied, and logits are scaled (PaLM, section 2).
    x = functional.embedding(inputs, self.embedding).to(self.dtype)
    for block in self.blocks:
      x = block(x, (self.sine, self.cosine))
    x = functional.layer_norm(x, x.shape[-1:], self.scale, eps=1e-6)
    return functional.linear(x * x.shape[-1] ** -0.5, self.embedding).float()


def compute_loss(model, inputs, targets):
  """Returns cross-entropy plus z-loss, both means over all tokens."""
  logits = model(inputs)
  log_z = logits.logsumexp(-1)
  target = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
  return (log_z - target + 1e-4 * log_z.square()).mean()


def make_step(sizes, model):
  """Returns a function that takes a step on one random batch."""
  shape = sizes.batch_size, sizes.sequence_length
  targets = torch.randint(sizes.vocab_size, shape)
  inputs = functional.pad(targets[:, :-1], (1, 0))
  optimizer = Adafactor(model.parameters(), compiled=sizes.compile)
  evaluate_loss = torch.compile(compute_loss) if sizes.compile else compute_loss
  reduced = sizes.dtype != "float32"

  def step() -> dict[str, float]:
    with torch.autocast(
      targets.device.type, DTYPES[sizes.dtype], enabled=reduced
    ):
      loss = evaluate_loss(model, inputs, targets)
    loss.backward()
    optimizer.step()
    return {"loss": loss.item()}  # waits for the step

  return step


def main() -> None:
  """Takes turns."""
  flags = make_parser(__doc__.splitlines()[0], dtypes=DTYPES, batch_size=8)
  flags.add_argument("--compile", action="store_true")
  sizes = flags.parse_args()
  if torch.cuda.is_available():
    torch.set_default_device("cuda")
    torch.set_float32_matmul_precision("high")
  torch.manual_seed(0)
  model = Palm(sizes)
  step = make_step(sizes, model)
  for _ in range(WARM_UP_STEPS):
    step()
  count = sum(p.numel() for p in model.parameters())
  take_turns(step, {"parameters": count})


if __name__ == "__main__":
  main()
