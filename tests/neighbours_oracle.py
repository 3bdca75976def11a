# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N803, N806 (names end in the letters of their axes)
"""Chunked cross-attention in float64 NumPy, one position after another.

It is written from the RETRO paper (Borgeaud et al. 2022, 2.3 and 2.4, and the
listing of appendix B.1). The attending chunk of chunk u is u's last token and
the tokens of the next chunk but its last.
"""

import math

import numpy as np

from tests import oracle


def cross_shapes(config) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of the parameters that a layer with NEIGHBOURS adds."""
  d, h, k = config.d_model, config.num_heads, config.d_kv
  kv = (k,) if config.attention == "multi_query" else (h, k)
  shapes = {}
  for name in ("condition", "cross"):
    shapes |= {f"{name}/{x}/scale": (d,) for x in ("norm", "memory_norm")}
    shapes |= {f"{name}/q": (d, h, k), f"{name}/o": (h, k, d)}
    shapes |= {f"{name}/k": (d, *kv), f"{name}/v": (d, *kv)}
  return shapes


def random_parameters(config, seed: int) -> dict[str, np.ndarray]:
  """Returns parameters of a model with NEIGHBOURS; see `oracle`."""
  params, rng = oracle.random_parameters(config, seed), np.random.default_rng(9)
  for index in range(config.num_layers):
    own, layer = oracle.settings_of_layer(config, index), f"layer_{index:03d}/"
    if not own.neighbours:
      continue
    for name in [x for x in params if x.startswith(layer)]:
      part = f"{layer}encoder/{name.removeprefix(layer)}"
      params[part] = params[name][..., ::-1].copy()
    for name, shape in cross_shapes(config).items():
      value = rng.standard_normal(shape)
      is_scale, is_output = name.endswith("scale"), name.endswith("/o")
      fan_in = np.prod(shape[:-1]) if is_output else shape[0]
      params[layer + name] = (
        1 + 0.3 * value if is_scale else value / math.sqrt(fan_in)
      )
  return params


def turn(config, x_HK, position: int):
  """Returns heads turned as at a position of a text (rotary embedding)."""
  rows = np.broadcast_to(x_HK, (1, position + 1, *x_HK.shape))
  return oracle.rotate(config, rows)[0, -1]


def cross(config, params, name, x_LD, at_L, memory_MD, at_M, visible_LM):
  """Returns x plus attention to `memory`; 0 for a position that sees nothing.

  `at_L` and `at_M` are positions, whose differences count.
  """
  y_LD = oracle.normalize(config, params, f"{name}/norm", x_LD[None])[0]
  z_MD = oracle.normalize(
    config, params, f"{name}/memory_norm", memory_MD[None]
  )[0]
  heads = config.num_heads
  w = {x: params[f"{name}/{x}"] for x in "qkvo"}
  w = {x: y[:, None] if y.ndim == 2 else y for x, y in w.items()}
  q_LHK = np.einsum("LD,DHK->LHK", y_LD, w["q"])
  k_MHK, v_MHK = (
    np.repeat(z, heads // z.shape[1], axis=1)
    for z in (np.einsum("MD,DNK->MNK", z_MD, w[x]) for x in "kv")
  )
  q_LHK = np.stack(
    [turn(config, q, p) for q, p in zip(q_LHK, at_L, strict=True)]
  )
  k_MHK = np.stack(
    [turn(config, k, p) for k, p in zip(k_MHK, at_M, strict=True)]
  )
  found = x_LD.copy()
  for i, visible_M in enumerate(visible_LM):
    if visible_M.any():
      scores_HM = np.einsum("HK,MHK->HM", q_LHK[i], k_MHK[visible_M])
      weights_HM = np.exp(scores_HM / math.sqrt(config.d_kv))
      weights_HM /= weights_HM.sum(-1, keepdims=True)
      out_HK = np.einsum("HM,MHK->HK", weights_HM, v_MHK[visible_M])
      found[i] += np.einsum("HK,HKD->D", out_HK, w["o"])
  return found


def forward(config, params, inputs, neighbours) -> np.ndarray:
  """Returns the logits [B, L, V]; `neighbours` are [B, chunks * k * r]."""
  m, table = config.chunk_length, params["embedding"]
  r, chunks = 2 * m, inputs.shape[1] // m
  tokens = neighbours.reshape(len(inputs), chunks, -1, r)
  visible_BLM = oracle.visible_positions(
    np.zeros_like(inputs), np.zeros_like(inputs)
  )
  found = []
  for row, of_row in zip(inputs, tokens, strict=True):
    x_LD = table[row] * config.embedding_scale
    e_UJRD = table[np.maximum(of_row, 0)] * config.embedding_scale
    for index in range(config.num_layers):
      layer, own = f"layer_{index:03d}", oracle.settings_of_layer(config, index)
      x_LD = oracle.block(own, params, layer, x_LD[None], visible_BLM[:1])[0]
      if not own.neighbours:
        continue
      before_LD, after_LD = x_LD, x_LD.copy()
      for u in range(chunks):
        real_JR = of_row[u] >= 0
        for j, real_R in enumerate(real_JR):
          if not real_R.any():
            continue
          e_RD = e_UJRD[u, j, real_R]  # real tokens come first
          n = len(e_RD)
          everything = np.ones([1, n, n], bool)
          name = f"{layer}/encoder"
          e_RD = oracle.block(own, params, name, e_RD[None], everything)[0]
          chunk_LD = before_LD[u * m : (u + 1) * m]
          e_UJRD[u, j, real_R] = cross(
            own, params, f"{layer}/condition", e_RD, range(n), chunk_LD,
            range(m), np.ones([n, m], bool),
          )  # fmt: skip
        memory_MD = e_UJRD[u].reshape(-1, e_UJRD.shape[-1])
        end = min((u + 2) * m - 1, len(row))
        place = range((u + 1) * m - 1, end)
        after_LD[place.start : end] = cross(
          own, params, f"{layer}/cross", before_LD[place.start : end],
          [i - u * m for i in place], memory_MD, [*range(r)] * len(real_JR),
          np.tile(real_JR.ravel(), (len(place), 1)),
        )  # fmt: skip
      x_LD = after_LD
    found.append(x_LD)
  return oracle.unembed(config, params, np.stack(found))
