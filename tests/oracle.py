# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N803, N806 (names end in the letters of their axes)
"""The forward pass, loss and optimizer in plain float64 NumPy.

Tests compare palm_mtf with it. It is written only from the papers (PaLM 2 and
5; Adafactor, Shazeer and Stern 2018; for other blocks, the papers that the
functions name) and shares no code with palm_mtf. The gradients of PaLM's block
come from oracle_jax.py.

Arrays have positional axes, named by the letters that end a variable's name:
  B batch        sequences
  L length       query positions
  M length       key and value positions
  D d_model      residual stream
  H num_heads    query heads
  N kv_heads     key and value heads; multi-query attention has 1
  K d_kv         one head
  F d_ff         hidden layer of the MLP
  V vocab_size   token types

`segments` [B, L] says which document a position belongs to. `prefix` [B, L]
says whether its token is given; given tokens attend to one another in both
directions (Liu et al. 2018; T5 3.2.1). `loss_weights` [B, L] says how much its
target counts. Without these arguments a row is one document, no token is given
and every target counts the same.

`config` has the fields of palm_mtf.config.ModelConfig, and `optimizer` has the
fields of AdafactorConfig. `params` and `gradients` map the name of a variable,
as in a checkpoint, to its array.
"""

import copy
import math
import re

import numpy as np

from tests.oracle_mlp import expert_shapes, experts, mlp, mlp_shapes

SQUARED_GRADIENT_EPSILON = 1e-30
T5_BUCKETS, T5_MAX_DISTANCE = 32, 128


def settings_of_layer(config, index: int):
  """Returns the settings of one layer: its variant's, then the model's.

  With names as lists and commas as sums, LAYERS is a Python expression.
  """
  if not config.layers:
    return config
  lists = re.sub(r"[a-z]\w*", lambda name: f"['{name[0]}']", config.layers)
  names = eval(lists.replace(",", "+"))
  found = copy.copy(config)
  for macro, value in config.variants[names[index % len(names)]].items():
    object.__setattr__(found, macro.lower(), value)
  return found


def _kv_heads(config) -> int:
  if config.attention == "multi_query":
    return 1
  return config.num_kv_heads or config.num_heads


def parameter_shapes(config) -> dict[str, tuple[int, ...]]:
  """Returns the shape of every variable, by name, in the order of creation."""
  d, h, k = config.d_model, config.num_heads, config.d_kv
  kv = (k,) if config.attention == "multi_query" else (_kv_heads(config), k)
  biases = config.biases.split(",")
  vectors = ["scale"] + ["bias"] * (config.norm == "layer_norm_bias")
  shapes = {"embedding": (config.vocab_size, d)}
  if config.positions == "learned":
    shapes["position_embedding"] = (config.sequence_length, d)
  for layer in range(config.num_layers):
    own = {f"norm/{x}": (d,) for x in vectors}
    for name, outputs in (("q", (h, k)), ("k", kv), ("v", kv)):
      own[f"attention/{name}"] = (d, *outputs)
      if "qkv" in biases:
        own[f"attention/{name}_bias"] = outputs
      if config.qk_norm != "none" and name != "v":
        is_whole = config.qk_norm == "rms_norm_all_heads"
        own[f"attention/{name}_norm/scale"] = outputs if is_whole else (k,)
    own["attention/o"] = (h, k, d)
    if "o" in biases:
      own["attention/o_bias"] = (d,)
    if config.positions == "t5":
      own["attention/relative_bias"] = (T5_BUCKETS, h)
    if config.positions == "transformer_xl":
      own["attention/relative"] = (d, h, k)
      own["attention/content_bias"] = (h, k)
      own["attention/position_bias"] = (h, k)
    if config.branch_norm:
      own |= {f"attention_output_norm/{x}": (d,) for x in vectors}
    if config.block != "parallel":
      own |= {f"mlp_norm/{x}": (d,) for x in vectors}
    kind = settings_of_layer(config, layer)
    own |= expert_shapes(kind) if kind.mlp == "experts" else mlp_shapes(kind)
    if config.branch_norm:
      own |= {f"mlp_output_norm/{x}": (d,) for x in vectors}
    shapes |= {f"layer_{layer:03d}/{name}": x for name, x in own.items()}
  if config.final_norm_scale == "learned":
    shapes |= {f"final_norm/{x}": (d,) for x in vectors}
  if config.output_embedding == "separate":
    shapes["output_embedding"] = (config.vocab_size, d)
  if "logits" in biases:
    shapes["logits/bias"] = (config.vocab_size,)
  return shapes


def random_parameters(config, seed: int) -> dict[str, np.ndarray]:
  """Returns parameters at which every term of the model matters.

  Unlike initial parameters, norm scales differ from one, biases from zero, and
  the embedding has a nonzero mean, so that layer_norm and rms_norm differ.
  """
  rng = np.random.default_rng(seed)
  params = {}
  for name, shape in parameter_shapes(config).items():
    value = rng.standard_normal(shape)
    if name.endswith("router_load"):
      value = np.exp(value) / np.sum(np.exp(value))
    elif name.endswith("scale"):
      kind = config.qk_norm if "attention/" in name else config.norm
      value = (kind != "rms_norm_1p") + 0.3 * value
    elif name.endswith("embedding"):
      value = 0.5 + value
    elif not name.endswith("bias"):
      rows = shape[1:] if "/experts/" in name else shape
      fan_in = np.prod(shape[:-1]) if name.endswith("/o") else rows[0]
      value = value / np.sqrt(fan_in)
    params[name] = value
  return params


def normalize(config, params, name: str, x_BLD):
  """Returns x with mean 0 and variance 1, or with mean square 1, scaled."""
  if config.norm in ("layer_norm", "layer_norm_bias"):
    x_BLD = x_BLD - x_BLD.mean(axis=-1, keepdims=True)
  mean_square_BL1 = (x_BLD**2).mean(axis=-1, keepdims=True)
  x_BLD = x_BLD / np.sqrt(mean_square_BL1 + config.norm_epsilon)
  if f"{name}/scale" in params:
    is_plus_one = config.norm == "rms_norm_1p"
    x_BLD = x_BLD * (params[f"{name}/scale"] + is_plus_one)
  return x_BLD + params.get(f"{name}/bias", 0.0)


def rotary_scaling(config, size: int) -> tuple[list[float], float]:
  """Returns radians per position of each pair, and the factor of q and k.

  linear: positions are divided by the factor s (Chen et al. 2023, 3.2).
  llama3: Llama 3.1's published code compares wavelengths.
  yarn: Peng et al. 2023, 3.2 and 3.4. h(theta) = (1 - g) theta / s + g theta,
  where, in the authors' code, g falls linearly from 1 at the pair that turns
  beta times in the original length to 0 at the pair that turns alpha times.
  """
  s, original = config.rotary_factor, config.rotary_original_length
  alpha, beta = config.rotary_slow or 1, config.rotary_fast or 32
  found, magnitude = [], 1.0
  for pair in range(size // 2):
    theta = config.rotary_base ** (-2 * pair / size)
    wavelength = 2 * math.pi / theta
    if config.rotary_scaling == "linear":
      theta = theta / s
    elif config.rotary_scaling == "llama3":
      if wavelength > original / alpha:
        theta = theta / s
      elif wavelength > original / beta:
        smooth = (original / wavelength - alpha) / (beta - alpha)
        theta = (1 - smooth) * theta / s + smooth * theta
    elif config.rotary_scaling == "yarn":
      # The pair p with theta_p = 2 pi turns / original.
      low, high = (
        -size / 2 * math.log(2 * math.pi * x / original, config.rotary_base)
        for x in (beta, alpha)
      )
      if config.rotary_truncate:
        low, high = math.floor(low), math.ceil(high)
      low, high = max(low, 0), min(high, size - 1)
      g = 1 - min(1, max(0, (pair - low) / max(high - low, 0.001)))
      theta = (1 - g) * theta / s + g * theta
      magnitude = config.rotary_attention_factor or 0.1 * math.log(s) + 1
    found.append(theta)
  return found, magnitude


def rotate(config, x_BLHK):
  """Returns x with pairs of its first numbers turned by their position's angle.

  (Su et al. 2021; GPT-J turns neighbours and GPT-NeoX halves of the first
  ROTARY_FRACTION of a head.)
  """
  if config.positions != "rotary":
    return x_BLHK
  length, size = x_BLHK.shape[1], round(config.rotary_fraction * config.d_kv)
  theta_K, magnitude = rotary_scaling(config, size)
  angle_LHK = np.arange(length)[:, None, None] * np.array(theta_K)
  cos_LHK, sin_LHK = (magnitude * f(angle_LHK) for f in (np.cos, np.sin))
  first_K = np.arange(size // 2)
  second_K = first_K + size // 2
  if config.rotary_pairs == "neighbours":
    first_K, second_K = 2 * first_K, 2 * first_K + 1
  a_BLHK, b_BLHK = x_BLHK[..., first_K], x_BLHK[..., second_K]
  y_BLHK = x_BLHK.copy()
  y_BLHK[..., first_K] = a_BLHK * cos_LHK - b_BLHK * sin_LHK
  y_BLHK[..., second_K] = b_BLHK * cos_LHK + a_BLHK * sin_LHK
  return y_BLHK


def t5_bucket(distance: int) -> int:
  """Returns the bucket of a key that is `distance` tokens before the query.

  (Raffel et al. 2020; the decoder's buckets, in which later keys share bucket
  0.) Half of the buckets hold one distance each; the others grow
  logarithmically up to T5_MAX_DISTANCE.
  """
  exact = T5_BUCKETS // 2
  if distance < exact:
    return max(0, distance)
  share = np.log(distance / exact) / np.log(T5_MAX_DISTANCE / exact)
  return min(T5_BUCKETS - 1, exact + int(share * (T5_BUCKETS - exact)))


def alibi_slopes(num_heads: int) -> list[float]:
  """Returns a slope per head (Press et al. 2022, and their code)."""

  def powers(n):
    return [2 ** (-8 * (i + 1) / n) for i in range(n)]

  closest = 1 << (num_heads.bit_length() - 1)
  return powers(closest) + powers(2 * closest)[0::2][: num_heads - closest]


def score_scale(config) -> float:
  """Returns the factor of the products of q and k."""
  return config.score_scale or 1 / np.sqrt(config.d_kv)


def position_scores(config, params, layer: str, q_BLHK):
  """Returns what positions add to scaled scores."""
  length, d = q_BLHK.shape[1], config.d_model
  distance_LM = np.arange(length)[:, None] - np.arange(length)
  if config.positions == "alibi":
    slopes_H11 = np.array(alibi_slopes(config.num_heads))[:, None, None]
    return -slopes_H11 * np.abs(distance_LM)
  if config.positions == "t5":
    table = params[f"{layer}/attention/relative_bias"]
    return np.moveaxis(table[np.vectorize(t5_bucket)(distance_LM)], -1, 0)
  if config.positions == "transformer_xl":  # Dai et al. 2019, equation 3.3
    half = (d + 1) // 2
    angle = np.maximum(distance_LM, 0)[..., None] / 10_000.0 ** (
      np.arange(half) / half
    )
    vector_LMD = np.concatenate([np.sin(angle), np.cos(angle)], -1)[..., :d]
    r_LMHK = np.einsum(
      "LMD,DHK->LMHK", vector_LMD, params[f"{layer}/attention/relative"]
    )
    q_BLHK = q_BLHK + params[f"{layer}/attention/position_bias"]
    scores = np.einsum("BLHK,LMHK->BHLM", q_BLHK, r_LMHK)
    return scores * score_scale(config)
  return 0.0


def visible_positions(segments_BL, prefix_BL):
  """Returns whether position L attends to M.

  It does if M is in the same document, and is not later or is in the prefix.
  """
  same_BLM = segments_BL[:, :, None] == segments_BL[:, None, :]
  past_LM = np.tri(segments_BL.shape[1], dtype=bool)
  return same_BLM & (past_LM | (prefix_BL[:, None, :] != 0))


def put_virtual(params, name: str, x):
  """Returns x [B, L, ...] whose first positions are rows of a trained table.

  Each row of the batch is one document. With an adapter, it begins with virtual
  positions, whose embeddings are trained (prompt tuning, Lester et al. 2021),
  or whose keys and values are, in each layer (Li and Liang 2021).
  """
  if name not in params:
    return x
  x, table = x.copy(), params[name]
  x[:, : len(table)] = table.reshape(len(table), *x.shape[2:])
  return x


def attend(config, params, layer: str, x_BLD, visible_BLM):
  """Returns causal attention of the normalized x, before the residual add.

  A position L sees M if L - M is less than the window (Child et al. 2019, the
  band of GPT-3's sparse layers; Mistral).
  """
  d, k, heads = config.d_model, config.d_kv, config.num_heads
  sharing = heads // _kv_heads(config)

  def project(name):
    w_DNK = params[f"{layer}/attention/{name}"].reshape(d, -1, k)
    x_BLNK = np.einsum("BLD,DNK->BLNK", x_BLD, w_DNK)
    bias = params.get(f"{layer}/attention/{name}_bias", np.zeros(k))
    x_BLNK = x_BLNK + bias.reshape(-1, k)
    if config.qk_norm != "none" and name != "v":
      is_whole = config.qk_norm == "rms_norm_all_heads"  # OLMoE
      axes = (-2, -1) if is_whole else -1
      mean_square = (x_BLNK**2).mean(axes, keepdims=True)
      x_BLNK = x_BLNK / np.sqrt(mean_square + config.norm_epsilon)
      scale_K = params[f"{layer}/attention/{name}_norm/scale"]
      x_BLNK = x_BLNK * (scale_K + (config.qk_norm == "rms_norm_1p"))
    return x_BLNK

  q_BLHK = rotate(config, project("q"))
  k_BMNK, v_BMNK = (
    put_virtual(params, f"{layer}/attention/{name}_virtual", x)
    for name, x in (("k", rotate(config, project("k"))), ("v", project("v")))
  )
  k_BMHK, v_BMHK = (np.repeat(x, sharing, axis=2) for x in (k_BMNK, v_BMNK))
  by_position = position_scores(config, params, layer, q_BLHK)
  q_BLHK = q_BLHK + params.get(f"{layer}/attention/content_bias", 0.0)
  scores_BHLM = np.einsum("BLHK,BMHK->BHLM", q_BLHK, k_BMHK)
  scores_BHLM = scores_BHLM * score_scale(config) + by_position
  if config.attention_window:
    far_LM = np.tri(len(visible_BLM[0]), k=-config.attention_window, dtype=bool)
    visible_BLM = visible_BLM & ~far_LM
  scores_BHLM = np.where(visible_BLM[:, None], scores_BHLM, -np.inf)
  scores_BHLM = scores_BHLM - scores_BHLM.max(axis=-1, keepdims=True)
  weights_BHLM = np.exp(scores_BHLM)
  weights_BHLM = weights_BHLM / weights_BHLM.sum(axis=-1, keepdims=True)
  y_BLHK = np.einsum("BHLM,BMHK->BLHK", weights_BHLM, v_BMHK)
  y_BLD = np.einsum("BLHK,HKD->BLD", y_BLHK, params[f"{layer}/attention/o"])
  return y_BLD + params.get(f"{layer}/attention/o_bias", 0.0)


def feed_forward(config, params, layer: str, x_BLD, states=None):
  """Returns the MLP of the normalized x, before the residual add.

  If `states` is given, writes how many tokens choose each expert to it, under
  the names of the router's states.
  """
  is_sparse = config.mlp == "experts"
  shapes = expert_shapes(config) if is_sparse else mlp_shapes(config)
  own = {x.removeprefix("mlp/"): params[f"{layer}/{x}"] for x in shapes}
  if is_sparse:
    y_BLD, chosen = experts(config, own, x_BLD)
    counts = np.bincount(np.ravel(chosen), minlength=config.num_experts)
    for name in ("router_load", "router_bias"):
      if states is not None and name in own:
        states[f"{layer}/mlp/{name}"] = counts
    return y_BLD
  return mlp(config.mlp, own, x_BLD)


def embed(config, params, inputs, segments):
  """Returns the input of the first block, [B, L, D]."""
  x_BLD = params["embedding"][inputs] * config.embedding_scale
  x_BLD = put_virtual(params, "virtual_embedding", x_BLD)
  if config.positions == "learned":
    for row, position in np.ndindex(*inputs.shape):
      start = position
      while start and segments[row, start - 1] == segments[row, position]:
        start -= 1
      x_BLD[row, position] += params["position_embedding"][position - start]
  return x_BLD


def block(config, params, layer: str, x_BLD, visible_BLM, states=None):
  """Returns the output of a layer; `config` is of this layer."""
  y_BLD = normalize(config, params, f"{layer}/norm", x_BLD)
  attention_BLD = attend(config, params, layer, y_BLD, visible_BLM)
  if config.branch_norm:  # Gemma 3
    name = f"{layer}/attention_output_norm"
    attention_BLD = normalize(config, params, name, attention_BLD)
  if config.block == "parallel_two_norms":
    y_BLD = normalize(config, params, f"{layer}/mlp_norm", x_BLD)
  x_BLD = x_BLD + attention_BLD
  if config.block == "serial":
    y_BLD = normalize(config, params, f"{layer}/mlp_norm", x_BLD)
  mlp_BLD = feed_forward(config, params, layer, y_BLD, states)
  if config.branch_norm:
    mlp_BLD = normalize(config, params, f"{layer}/mlp_output_norm", mlp_BLD)
  return x_BLD + mlp_BLD


def forward(
  config, params, inputs, segments=None, prefix=None, states=None
) -> np.ndarray:
  """Returns the logits [B, L, V] of the token after each of `inputs` [B, L].

  For `states` see `feed_forward`.
  """
  segments, prefix = (
    np.zeros_like(inputs) if x is None else x for x in (segments, prefix)
  )
  visible_BLM = visible_positions(segments, prefix)
  x_BLD = embed(config, params, inputs, segments)
  for index in range(config.num_layers):
    layer, own = f"layer_{index:03d}", settings_of_layer(config, index)
    x_BLD = block(own, params, layer, x_BLD, visible_BLM, states)
  return unembed(config, params, x_BLD)


def unembed(config, params, x_BLD):
  """Returns the logits of the output of the last block."""
  x_BLD = normalize(config, params, "final_norm", x_BLD)
  table_VD = params.get("output_embedding", params["embedding"])
  scale = config.logits_scale or config.d_model**-0.5
  return scale * x_BLD @ table_VD.T + params.get("logits/bias", 0.0)


def loss(
  config,
  params,
  inputs,
  targets,
  z_loss: float,
  segments=None,
  loss_weights=None,
  prefix=None,
):
  """Returns the mean cross-entropy in nats and the z-loss term.

  `inputs` and `targets` are [B, L], targets one position ahead. Training
  minimizes the sum of both terms; the second includes its weight `z_loss`.
  """
  logits_BLV = forward(config, params, inputs, segments, prefix)
  return loss_of_logits(logits_BLV, targets, z_loss, loss_weights)


def loss_of_logits(logits_BLV, targets, z_loss: float, loss_weights=None):
  """Returns the terms that `loss` returns, given the logits."""
  if loss_weights is None:
    loss_weights = np.ones(targets.shape)
  share_BL = loss_weights / np.sum(loss_weights, dtype=np.float64)
  largest_BL = logits_BLV.max(axis=-1)
  exp_BLV = np.exp(logits_BLV - largest_BL[..., None])
  log_z_BL = largest_BL + np.log(exp_BLV.sum(axis=-1))
  target_BL1 = np.take_along_axis(logits_BLV, targets[..., None], axis=-1)
  cross_entropy = np.sum(share_BL * (log_z_BL - target_BL1[..., 0]))
  return cross_entropy, z_loss * np.sum(share_BL * log_z_BL**2)


def log_likelihood(config, params, given, targets, start=0) -> float:
  """Returns log p of the tokens `targets` after the tokens `given`, in nats.

  Both are lists; the token `start` stands before them. If OBJECTIVE is not
  "causal", `start` and `given` attend to one another in both directions.
  """
  tokens = [start, *given, *targets]
  prefix = np.zeros([1, len(tokens) - 1])
  if config.objective != "causal":
    prefix[0, : 1 + len(given)] = 1
  logits_LV = forward(config, params, np.array([tokens[:-1]]), prefix=prefix)[0]
  largest_L1 = logits_LV.max(axis=-1, keepdims=True)
  log_z_L1 = np.log(np.exp(logits_LV - largest_L1).sum(-1, keepdims=True))
  log_p_LV = logits_LV - largest_L1 - log_z_L1
  places = range(len(given), len(tokens) - 1)
  return float(sum(log_p_LV[i, tokens[i + 1]] for i in places))


def root_mean_square(x) -> float:
  """Returns the root of the mean square over all axes of x."""
  return np.sqrt(np.mean(np.square(x)))


def as_matrix(name: str, x):
  """Returns a kernel as [fan-in, fan-out], the embedding as [V, D]."""
  # Out of heads and their dimensions; or the rows of all experts.
  if name.endswith("attention/o") or "/experts/" in name:
    return x.reshape(-1, x.shape[-1])
  return x.reshape(x.shape[0], -1)


def scale_group(name: str, parameter_scale: str) -> str:
  """Returns one key for all parameters that share root mean squares."""
  layer, _, rest = name.partition("/")
  if parameter_scale != "stacked" or not layer.startswith("layer_"):
    return name
  fused = {
    "attention/q": "q_wi",
    "mlp/wi_gate": "q_wi",
    "mlp/wi": "q_wi",
    "attention/k": "kv",
    "attention/v": "kv",
    "attention/o": "o_wo",
    "mlp/wo": "o_wo",
  }
  return fused.get(rest, rest)


class Adafactor:
  """Adafactor as PaLM used it (PaLM 5), and the forms of the first paper.

  Attributes:
    step_number: k of the last step, 0 before the first.
    second_moments: mean squared gradient, by name.
    row_sums: sums of the squared gradients of a matrix, [fan-in], by name, if
      the second moment is factored (Algorithm 4) instead of second_moments.
    column_sums: the same sums over the other axis, [fan-out].
    updates: gradients over the roots of their second moments, in the last step.
    momenta: mean update, including learning rate and parameter scale, by name.
    learning_rate: learning rate of the last step.
    gradient_norm: global norm of the last gradients before they were clipped.
  """

  def __init__(self, optimizer, params):
    self.optimizer = optimizer
    self.step_number = 0
    self.second_moments, self.row_sums, self.column_sums = {}, {}, {}
    for name, p in params.items():
      if optimizer.second_moment == "factored" and p.ndim > 1:
        fan_in, fan_out = as_matrix(name, p).shape
        self.row_sums[name] = np.zeros(fan_in)
        self.column_sums[name] = np.zeros(fan_out)
      else:
        self.second_moments[name] = np.zeros_like(p)
    self.momenta = {n: np.zeros_like(p) for n, p in params.items()}
    self.updates = {}
    self.learning_rate = self.gradient_norm = 0.0

  def step(self, params, gradients) -> dict[str, np.ndarray]:
    """Returns the parameters after one more step; `params` is not changed."""
    settings = self.optimizer
    self.step_number += 1
    k = float(self.step_number)
    self.learning_rate = lr = settings.learning_rate
    if settings.learning_rate_schedule == "palm":
      self.learning_rate = lr = min(lr, k**-0.5)
    self.gradient_norm = np.sqrt(sum(np.sum(g**2) for g in gradients.values()))
    shrink = 1.0
    if self.gradient_norm > settings.gradient_clip:
      shrink = settings.gradient_clip / self.gradient_norm
    self.updates = updates = {
      name: self._scaled_by_moment(name, gradients[name] * shrink)
      for name in params
    }
    stepped = {}
    for name, p in params.items():
      group = [n for n in params if self._group(n) == self._group(name)]
      u = updates[name]
      if settings.update_clip is not None:
        largest = root_mean_square(
          np.concatenate([updates[n].ravel() for n in group])
        )
        u = u / max(1.0, largest / settings.update_clip)
      if settings.parameter_scale != "off":
        size = root_mean_square(
          np.concatenate([(params[n] - self._center(n)).ravel() for n in group])
        )
        u = u * max(settings.parameter_scale_floor, size)
      m = settings.beta1 * self.momenta[name]
      m = m + (1.0 - settings.beta1) * lr * u
      # Decay acts on the parameter that Google's code stores: a norm's scale
      # minus one.
      stored = p - self._center(name)
      stepped[name] = (
        stored * (1.0 - self._decay(name)) - m + self._center(name)
      )
      self.momenta[name] = m
    return stepped

  def _scaled_by_moment(self, name, g):
    """Returns g over the root of its second moment, which it updates."""
    beta2 = 1.0 - self.step_number**-self.optimizer.beta2_exponent
    squares = g**2 + SQUARED_GRADIENT_EPSILON
    if name in self.second_moments:
      v = beta2 * self.second_moments[name] + (1.0 - beta2) * squares
      self.second_moments[name] = v
      return g / np.sqrt(v)
    squares = as_matrix(name, squares)
    r, c = beta2 * self.row_sums[name], beta2 * self.column_sums[name]
    r = r + (1.0 - beta2) * squares @ np.ones(squares.shape[1])
    c = c + (1.0 - beta2) * np.ones(squares.shape[0]) @ squares
    self.row_sums[name], self.column_sums[name] = r, c
    return g / np.sqrt(np.outer(r, c) / np.sum(r)).reshape(g.shape)

  def _group(self, name):
    return scale_group(name, self.optimizer.parameter_scale)

  def _center(self, name):
    zero_centered = self.optimizer.norm_scale == "zero_centered"
    return 1.0 if zero_centered and name.endswith("/scale") else 0.0

  def _decay(self, name):
    """Returns the share by which a parameter shrinks in this step."""
    exponent = self.optimizer.weight_decay_exponent
    spared = {
      "all": (),
      "all_but_scales": ("scale",),
      "kernels": ("scale", "embedding"),
    }[self.optimizer.weight_decay_on]
    if exponent is None or name.rpartition("/")[2] in spared:
      return 0.0
    return self.learning_rate**exponent
