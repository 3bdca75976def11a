# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N803, N806 (names end in the letters of their axes)
"""MLPs and experts in plain float64 NumPy: a part of oracle.py.

E num_experts   experts, and one score per expert
"""

import collections
import math

import numpy as np


def activation(mlp: str, x):
  """Returns the function of `mlp`, or of its gate (Shazeer 2020), of x."""
  if mlp == "swiglu":
    return x / (1.0 + np.exp(-x))
  if mlp in ("relu", "relu2"):
    return np.maximum(x, 0.0) ** (2 if mlp == "relu2" else 1)
  if mlp.endswith("tanh"):
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    return x * (1 + np.tanh(inner)) / 2
  return x * (1 + np.vectorize(math.erf)(x / np.sqrt(2))) / 2


GATED = "swiglu", "geglu", "geglu_tanh"


def mlp_shapes(config) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of an MLP's parameters, by name in the layer."""
  d, f, has_bias = (
    config.d_model,
    config.d_ff,
    "mlp" in config.biases.split(","),
  )
  own = {}
  for name in ["wi_gate"] * (config.mlp in GATED) + ["wi"]:
    own[f"mlp/{name}"] = (d, f)
    if has_bias:
      own[f"mlp/{name}_bias"] = (f,)
  own["mlp/wo"] = (f, d)
  if has_bias:
    own["mlp/wo_bias"] = (d,)
  return own


def expert_shapes(config) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of all experts' parameters, by name in the layer."""
  d, e, f = config.d_model, config.num_experts, config.d_expert or config.d_ff
  inputs = ["wi_gate"] * (config.expert_mlp in GATED) + ["wi"]
  own = {}
  if config.shared_experts:
    wide = config.shared_experts * f
    own |= {f"mlp/shared/{name}": (d, wide) for name in inputs}
    own["mlp/shared/wo"] = (wide, d)
  own["mlp/router"] = (d, e)
  own |= {f"mlp/experts/{name}": (e, d, f) for name in inputs}
  own["mlp/experts/wo"] = (e, f, d)
  own["mlp/router_load"] = (e,)
  if config.router_bias:
    own["mlp/router_bias"] = (e,)
  return own


def mlp(kind: str, params, x):
  """Returns the MLP `kind` of x; `params` has its kernels and biases."""

  def project(name, x):
    return x @ params[name] + params.get(f"{name}_bias", 0.0)

  hidden = project("wi", x)
  if kind in GATED:
    hidden = activation(kind, project("wi_gate", x)) * hidden
  else:
    hidden = activation(kind, hidden)
  return project("wo", hidden)


def router(config, params, x_LD):
  """Returns the logits and the scores of all experts, [L, E] each.

  Also returns each token's experts, highest score first, and their gates.
  """
  z_LE = x_LD @ params["router"]
  if config.router == "softmax":
    exp_LE = np.exp(z_LE - z_LE.max(axis=-1, keepdims=True))
    p_LE = exp_LE / exp_LE.sum(axis=-1, keepdims=True)
  else:
    p_LE = 1.0 / (1.0 + np.exp(-z_LE))
  of_choice = p_LE + params.get("router_bias", 0.0)
  order = np.argsort(-of_choice, axis=-1, kind="stable")  # ties: lower first
  chosen = order[:, : config.experts_per_token]
  gates = np.take_along_axis(p_LE, chosen, axis=-1)
  if config.router_normalizes:
    gates = gates / gates.sum(axis=-1, keepdims=True)
  return z_LE, p_LE, chosen, config.router_scale * gates


def taken(config, chosen) -> set[tuple[int, int]]:
  """Returns the (token, rank of choice) that experts of a sequence take."""
  length, count = chosen.shape
  most = length
  if config.capacity_factor is not None:
    share = config.capacity_factor * count / config.num_experts
    most = math.ceil(length * share)
  load, found = collections.Counter(), set()
  for rank in range(count):  # GShard: all first choices, then all second ones
    for token in range(length):
      expert = chosen[token, rank]
      load[expert] += 1
      if load[expert] <= most:
        found.add((token, rank))
  return found


def experts(config, params, x_BLD):
  """Returns the sum of each token's experts, times gates, and shared experts.

  Also returns the experts that each token chose, [B, L, chosen].

  Shazeer et al. 2017, equation 1; capacities of Lepikhin et al. 2021; shared
  experts and a bias of the choice of DeepSeek-V3.
  """
  y_BLD = np.zeros(x_BLD.shape)
  if config.shared_experts:
    shared = {
      name.removeprefix("shared/"): value
      for name, value in params.items()
      if name.startswith("shared/")
    }
    y_BLD += mlp(config.expert_mlp, shared, x_BLD)
  choices = []
  for x_LD, y_LD in zip(x_BLD, y_BLD, strict=True):
    _, _, chosen, gates = router(config, params, x_LD)
    choices.append(chosen)
    for token, rank in taken(config, chosen):
      expert = chosen[token, rank]
      own = {
        name.removeprefix("experts/"): value[expert]
        for name, value in params.items()
        if name.startswith("experts/")
      }
      y = mlp(config.expert_mlp, own, x_LD[token])
      y_LD[token] += gates[token, rank] * y
  return y_BLD, np.array(choices)
