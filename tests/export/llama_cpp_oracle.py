# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N803 (names end in the letters of their axes)
"""The forward passes of llama.cpp's command-r and granite.

Written after its graphs, in float64 NumPy; axes are named as in oracle.py.
"""

import numpy as np


def _norm(key, tensors, name, x):
  if key("attention.layer_norm_epsilon"):
    x = x - x.mean(-1, keepdims=True)
  epsilon = key("attention.layer_norm_epsilon") or key(
    "attention.layer_norm_rms_epsilon"
  )
  variance = (x**2).mean(-1, keepdims=True)
  return x / np.sqrt(variance + epsilon) * tensors[f"{name}.weight"]


def _attend(key, tensors, layer, y_LD):
  d_kv, heads = key("attention.key_length"), key("attention.head_count")
  shared = key("attention.head_count_kv")

  def project(name, count):
    x = y_LD @ tensors[f"{layer}.attn_{name}.weight"].T
    return x.reshape(len(x), count, d_kv).swapaxes(0, 1)

  def turned(x_HLK):  # neighbours, as LLAMA_ROPE_TYPE_NORM
    pairs = x_HLK[..., ::2] + 1j * x_HLK[..., 1::2]
    size = key("rope.dimension_count")
    frequency = key("rope.freq_base") ** (-np.arange(0, size, 2) / size)
    pairs = pairs * np.exp(1j * np.arange(len(y_LD))[:, None] * frequency)
    return np.stack([pairs.real, pairs.imag], -1).reshape(x_HLK.shape)

  q, k = turned(project("q", heads)), turned(project("k", shared))
  k, v = (np.repeat(x, heads // shared, 0) for x in (k, project("v", shared)))
  scores = q @ k.swapaxes(1, 2) * (key("attention.scale") or d_kv**-0.5)
  scores = np.where(np.tri(len(y_LD), dtype=bool), scores, -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  out = (weights / weights.sum(-1, keepdims=True)) @ v
  out = out.swapaxes(0, 1).reshape(len(y_LD), -1)
  return out @ tensors[f"{layer}.attn_output.weight"].T


def _feed_forward(tensors, layer, y):
  gate = y @ tensors[f"{layer}.ffn_gate.weight"].T
  hidden = (
    gate / (1 + np.exp(-gate)) * (y @ tensors[f"{layer}.ffn_up.weight"].T)
  )
  return hidden @ tensors[f"{layer}.ffn_down.weight"].T


def forward(metadata, tensors, tokens):
  """Returns the logits of a text, [L, V], from GGUF metadata and tensors."""
  name = metadata["general.architecture"]

  def key(rest):
    return metadata.get(f"{name}.{rest}")

  x = tensors["token_embd.weight"][tokens]
  for i in range(key("block_count")):
    layer = f"blk.{i}"
    y = _norm(key, tensors, f"{layer}.attn_norm", x)
    attention = _attend(key, tensors, layer, y)
    if name == "command-r":
      x = x + attention + _feed_forward(tensors, layer, y)
    else:
      x = x + attention
      y = _norm(key, tensors, f"{layer}.ffn_norm", x)
      x = x + _feed_forward(tensors, layer, y)
  logits = (
    _norm(key, tensors, "output_norm", x) @ tensors["token_embd.weight"].T
  )
  scale = key("logit_scale")
  return logits * scale if name == "command-r" else logits / scale
