# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a GPT in PyTorch; a turn is --turn_secs of processor time.

python torch_gpt.py --data FOLDER --learning_rate 2e-3 --budget_secs 600
"""

# The usual recipe (Radford et al. 2019; Brown et al. 2020): serial blocks with
# biases, GELU, learned positions, tied embedding; AdamW with betas 0.9 and
# 0.95, weight decay 0.1 for matrices, a clipped gradient norm, and a learning
# rate that warms up for 2% of the budget and falls to a tenth by a cosine. The
# loss is compiled, in the dtype that is faster on this machine. Needs torch and
# numpy. tools/bench writes the tokens and starts the program.

import argparse
import copy
import itertools
import math
import os
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from turns import take_turns

WARM_UP_SHARE, END_SHARE = 0.02, 0.1
DTYPES = (torch.float32, torch.bfloat16)


class Block(nn.Module):
  """Attention, then an MLP, each after a LayerNorm."""

  def __init__(self, width, heads):
    super().__init__()
    self.heads = heads
    self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
    self.into = nn.Linear(width, 3 * width)
    self.out = nn.Linear(width, width)
    self.up = nn.Linear(width, 4 * width)
    self.down = nn.Linear(4 * width, width)

  def forward(self, x):
    """Returns x, [batch, length, width], after the block."""
    q, k, v = (
      y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
      for y in self.into(self.norms[0](x)).chunk(3, -1)
    )
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + self.out(y.transpose(1, 2).flatten(2))
    return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Gpt(nn.Module):
  """A GPT; `forward` returns the mean loss of targets."""

  def __init__(self, flags):
    super().__init__()
    width = flags.d_model
    self.tokens = nn.Embedding(flags.vocab_size, width)
    self.places = nn.Embedding(flags.sequence_length, width)
    self.blocks = nn.ModuleList(
      [Block(width, flags.num_heads) for _ in range(flags.num_layers)]
    )
    self.norm = nn.LayerNorm(width)
    for name, x in self.named_parameters():
      if x.ndim == 2:
        # As in GPT-2: projections into the stream add up over the layers.
        is_last = name.endswith(("out.weight", "down.weight"))
        share = (2 * flags.num_layers) ** -0.5 if is_last else 1.0
        nn.init.normal_(x, std=0.02 * share)
      elif name.endswith("bias"):
        nn.init.zeros_(x)

  def forward(self, targets):
    """Returns the mean loss of [batch, length] tokens."""
    inputs = functional.pad(targets[:, :-1], (1, 0))
    x = self.tokens(inputs) + self.places.weight
    for block in self.blocks:
      x = block(x)
    logits = functional.linear(self.norm(x), self.tokens.weight)
    return functional.cross_entropy(
      logits.flatten(0, 1).float(), targets.flatten()
    )


class Training:
  """A model, its optimizer and its rows."""

  def __init__(self, flags):
    torch.manual_seed(0)
    self.flags = flags
    self.model = Gpt(flags)
    self.loss = torch.compile(self.model)
    self.first_weights = copy.deepcopy(self.model.state_dict())
    self.rows, self.validation = (
      torch.from_numpy(np.load(os.path.join(flags.data, f"{x}.npy")))
      for x in ("train", "validation")
    )

  def begin(self, dtype):
    """Resets to the initial weights, with products in this dtype."""
    self.dtype, self.spent_secs, self.num_steps = dtype, 0.0, 0
    self.model.load_state_dict(self.first_weights)
    matrices = [x for x in self.model.parameters() if x.ndim == 2]
    others = [x for x in self.model.parameters() if x.ndim != 2]
    self.optimizer = torch.optim.AdamW(
      [{"params": matrices, "weight_decay": 0.1}, {"params": others}],
      betas=(0.9, 0.95),
      weight_decay=0.0,
      fused=True,
    )
    size = self.flags.batch_size
    self.batches = itertools.cycle(
      self.rows[i * size : (i + 1) * size].long()
      for i in range(len(self.rows) // size)
    )

  def autocast(self):
    """Returns a context in which products are computed in the dtype."""
    is_reduced = self.dtype != torch.float32
    return torch.autocast("cpu", self.dtype, enabled=is_reduced)

  def step(self):
    """Takes a step, and adds its processor time to `spent_secs`."""
    start = time.process_time()
    done = self.spent_secs / self.flags.budget_secs
    rate = min(done / WARM_UP_SHARE, 1.0)
    falls = (1 + math.cos(math.pi * min(done, 1.0))) / 2
    rate *= END_SHARE + (1 - END_SHARE) * falls
    for group in self.optimizer.param_groups:
      group["lr"] = rate * self.flags.learning_rate
    with self.autocast():
      loss = self.loss(next(self.batches))
    loss.backward()
    nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
    self.optimizer.step()
    self.optimizer.zero_grad()
    self.spent_secs += time.process_time() - start
    self.num_steps += 1

  def time_steps(self, dtype) -> float:
    """Returns the seconds of the first steps in a dtype, when warm."""
    self.begin(dtype)
    for _ in range(3):
      self.step()
    start = time.perf_counter()
    for _ in range(8):
      self.step()
    return time.perf_counter() - start

  @torch.no_grad()
  def validation_loss(self) -> float:
    """Returns the mean loss of the validation rows."""
    parts = self.validation.split(self.flags.batch_size)
    with self.autocast():
      return float(np.mean([self.loss(x.long()).item() for x in parts]))


def main() -> None:
  """Takes turns."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  for name in (
    *("num_layers", "num_heads", "d_model", "vocab_size"),
    *("sequence_length", "batch_size"),
  ):
    add(f"--{name}", type=int, required=True)
  for name in ("learning_rate", "budget_secs", "turn_secs"):
    add(f"--{name}", type=float, required=True)
  add("--data", required=True, help="folder of train.npy and validation.npy")
  flags = parser.parse_args()
  training = Training(flags)
  training.begin(min(DTYPES, key=training.time_steps))

  def turn() -> dict[str, float]:
    end = training.spent_secs + flags.turn_secs
    while training.spent_secs < end:
      training.step()
    return {
      "processor_secs": training.spent_secs,
      "loss": training.validation_loss(),
      "step": training.num_steps,
    }

  training.validation_loss()  # compiles
  count = sum(x.numel() for x in training.model.parameters())
  is_bfloat16 = training.dtype == torch.bfloat16
  take_turns(turn, {"parameters": count, "is_bfloat16": is_bfloat16})


if __name__ == "__main__":
  main()
