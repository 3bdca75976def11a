# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N803, N806 (names end in the letters of their axes)
"""The forward passes of llama.cpp's command-r, cohere2, gemma3 and granite.

Written after its graphs and the Gemma 3 report (2025, section 2), in float64
NumPy; axes are named as in oracle.py.
"""

import numpy as np

# {architecture with windows: number of layers up to one without a window}
_PERIODS = {"cohere2": 4, "gemma3": 6}
_MOST_ROWS = 2**13  # of an embedding in one product, to save memory


def _norm(key, tensors, name, x):
  if key("attention.layer_norm_epsilon"):
    x = x - x.mean(-1, keepdims=True)
  epsilon = key("attention.layer_norm_epsilon") or key(
    "attention.layer_norm_rms_epsilon"
  )
  variance = (x**2).mean(-1, keepdims=True)
  return x / np.sqrt(variance + epsilon) * tensors[f"{name}.weight"]


def _frequencies(name, key, has_window):
  """Returns radians per position of each pair; None for no rotation."""
  size = key("rope.dimension_count") or key("attention.key_length")
  base, factor = key("rope.freq_base"), key("rope.scaling.factor") or 1
  if name == "cohere2" and not has_window:
    return None
  if name == "gemma3" and has_window:
    base, factor = key("rope.freq_base_swa") or 10_000.0, 1
  return base ** (-np.arange(0, size, 2) / size) / factor


def _attend(name, key, tensors, index, y_LD):
  d_kv, heads = key("attention.key_length"), key("attention.head_count")
  shared = key("attention.head_count_kv")
  layer, length = f"blk.{index}", len(y_LD)
  period = key("attention.sliding_window_pattern") or _PERIODS.get(name, 1)
  has_window = (index + 1) % period > 0
  frequencies = _frequencies(name, key, has_window)

  def project(part, count):
    x = y_LD @ tensors[f"{layer}.attn_{part}.weight"].T
    return x.reshape(length, count, d_kv).swapaxes(0, 1)

  def turned(part, count):
    x_HLK = project(part, count)
    if name == "gemma3":
      x_HLK = _norm(key, tensors, f"{layer}.attn_{part}_norm", x_HLK)
    if frequencies is None:
      return x_HLK
    # LLAMA_ROPE_TYPE_NEOX turns halves, and LLAMA_ROPE_TYPE_NORM neighbours.
    is_neox, half = name == "gemma3", d_kv // 2
    pairs = x_HLK[..., ::2] + 1j * x_HLK[..., 1::2]
    if is_neox:
      pairs = x_HLK[..., :half] + 1j * x_HLK[..., half:]
    pairs = pairs * np.exp(1j * np.arange(length)[:, None] * frequencies)
    parts = [pairs.real, pairs.imag]
    if is_neox:
      return np.concatenate(parts, -1)
    return np.stack(parts, -1).reshape(x_HLK.shape)

  q, k = turned("q", heads), turned("k", shared)
  k, v = (np.repeat(x, heads // shared, 0) for x in (k, project("v", shared)))
  scores = q @ k.swapaxes(1, 2) * (key("attention.scale") or d_kv**-0.5)
  visible = np.tri(length, dtype=bool)
  if has_window:
    visible &= ~np.tri(length, k=-key("attention.sliding_window"), dtype=bool)
  scores = np.where(visible, scores, -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  out = (weights / weights.sum(-1, keepdims=True)) @ v
  out = out.swapaxes(0, 1).reshape(length, -1)
  return out @ tensors[f"{layer}.attn_output.weight"].T


def _feed_forward(name, tensors, layer, y):
  x = y @ tensors[f"{layer}.ffn_gate.weight"].T
  gate = x / (1 + np.exp(-x))
  if name == "gemma3":
    gate = x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
  hidden = gate * (y @ tensors[f"{layer}.ffn_up.weight"].T)
  return hidden @ tensors[f"{layer}.ffn_down.weight"].T


def _hidden(metadata, tensors, tokens):
  """Returns what the output embedding multiplies, [L, D]."""
  name = metadata["general.architecture"]

  def key(rest):
    return metadata.get(f"{name}.{rest}")

  x = tensors["token_embd.weight"][tokens].astype(float)
  if name == "gemma3":
    x = x * key("embedding_length") ** 0.5
  for i in range(key("block_count")):
    layer = f"blk.{i}"
    y = _norm(key, tensors, f"{layer}.attn_norm", x)
    attention = _attend(name, key, tensors, i, y)
    if name in ("command-r", "cohere2"):
      x = x + attention + _feed_forward(name, tensors, layer, y)
      continue
    if name == "gemma3":
      post = f"{layer}.post_attention_norm"
      attention = _norm(key, tensors, post, attention)
    x = x + attention
    y = _norm(key, tensors, f"{layer}.ffn_norm", x)
    y = _feed_forward(name, tensors, layer, y)
    if name == "gemma3":
      y = _norm(key, tensors, f"{layer}.post_ffw_norm", y)
    x = x + y
  x, scale = _norm(key, tensors, "output_norm", x), key("logit_scale") or 1
  return x / scale if name == "granite" else x * scale


def forward(metadata, tensors, tokens):
  """Returns the logits of a text, [L, V], from GGUF metadata and tensors."""
  hidden_LD = _hidden(metadata, tensors, tokens)
  return hidden_LD @ tensors["token_embd.weight"].T


def compute_log_p(path, tokens):
  """Returns log p of all tokens of a text after the first.

  The gguf package reads the file at `path` and dequantizes it.
  """
  from gguf import GGUFReader, dequantize

  reader = GGUFReader(path)
  metadata = {name: x.contents() for name, x in reader.fields.items()}
  tensors = {x.name: dequantize(x.data, x.tensor_type) for x in reader.tensors}
  hidden_LD = _hidden(metadata, tensors, np.array(tokens[:-1]))
  table_VD, log_z_L = tensors["token_embd.weight"], -np.inf
  for first in range(0, len(table_VD), _MOST_ROWS):
    logits_LV = hidden_LD @ table_VD[first : first + _MOST_ROWS].T
    largest_L1 = logits_LV.max(-1, keepdims=True)
    sum_L = np.exp(logits_LV - largest_L1).sum(-1)
    log_z_L = np.logaddexp(log_z_L, largest_L1[:, 0] + np.log(sum_L))
  return float(((hidden_LD * table_VD[tokens[1:]]).sum(-1) - log_z_L).sum())
