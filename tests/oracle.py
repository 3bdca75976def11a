# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N803, N806 (names end in the letters of their axes)
"""PaLM's forward pass, loss and optimizer in plain float64 NumPy.

Tests compare palm_mtf with it. It is written only from the papers (PaLM 2 and
5; Adafactor, Shazeer and Stern 2018) and shares no code with palm_mtf. The
gradients come from oracle_jax.py.

Arrays have positional axes, named by the letters that end a variable's name:
  B batch        sequences
  L length       query positions
  M length       key and value positions
  D d_model      residual stream
  H num_heads    query heads
  K d_kv         one head
  F d_ff         hidden layer of the MLP
  V vocab_size   token types

`segments` [B, L] says which document a position belongs to. `prefix` [B, L]
says whether its token is given; given tokens attend to one another in both
directions (Liu et al. 2018; T5 3.2.1). `loss_weights` [B, L] says how much its
target counts. Without these arguments a row is one document, no token is given
and every target counts the same.

`config` has the fields of palm_mtf.config.PalmConfig, and `optimizer` has the
fields of AdafactorConfig. `params` and `gradients` map the name of a variable,
as in a checkpoint, to its array.
"""

import numpy as np

NORM_EPSILON = 1e-6
ROTARY_THETA = 10000.0
SQUARED_GRADIENT_EPSILON = 1e-30


def parameter_shapes(config) -> dict[str, tuple[int, ...]]:
  """Returns the shape of every variable, by name, in the order of creation."""
  d, h, k, f = config.d_model, config.num_heads, config.d_kv, config.d_ff
  memory = (d, h, k) if config.attention == "multi_head" else (d, k)
  shapes = {"embedding": (config.vocab_size, d)}
  for layer in range(config.num_layers):
    shapes[f"layer_{layer:03d}/norm/scale"] = (d,)
    shapes[f"layer_{layer:03d}/attention/q"] = (d, h, k)
    shapes[f"layer_{layer:03d}/attention/k"] = memory
    shapes[f"layer_{layer:03d}/attention/v"] = memory
    shapes[f"layer_{layer:03d}/attention/o"] = (h, k, d)
    shapes[f"layer_{layer:03d}/mlp/wi_gate"] = (d, f)
    shapes[f"layer_{layer:03d}/mlp/wi"] = (d, f)
    shapes[f"layer_{layer:03d}/mlp/wo"] = (f, d)
    if config.block == "serial":
      shapes[f"layer_{layer:03d}/mlp_norm/scale"] = (d,)
  if config.final_norm_scale == "learned":
    shapes["final_norm/scale"] = (d,)
  return shapes


def random_parameters(config, seed: int) -> dict[str, np.ndarray]:
  """Returns parameters at which every term of the model matters.

  Unlike initial parameters, norm scales differ from one, and the embedding has
  a nonzero mean, so that layer_norm and rms_norm differ.
  """
  rng = np.random.default_rng(seed)
  params = {}
  for name, shape in parameter_shapes(config).items():
    value = rng.standard_normal(shape)
    if name.endswith("scale"):
      value = 1.0 + 0.3 * value
    elif name == "embedding":
      value = 0.5 + value
    else:
      fan_in = np.prod(shape[:-1]) if name.endswith("/o") else shape[0]
      value = value / np.sqrt(fan_in)
    params[name] = value
  return params


def normalize(config, x_BLD, scale_D):
  """Returns x with mean 0 and variance 1, or with mean square 1, scaled."""
  if config.norm == "layer_norm":
    x_BLD = x_BLD - x_BLD.mean(axis=-1, keepdims=True)
  mean_square_BL1 = (x_BLD**2).mean(axis=-1, keepdims=True)
  return x_BLD / np.sqrt(mean_square_BL1 + NORM_EPSILON) * scale_D


def rotate(x_BLHK):
  """Returns x with each pair (i, i + K/2) turned by position * frequency_i."""
  length, d_kv = x_BLHK.shape[1], x_BLHK.shape[3]
  timescale_K = ROTARY_THETA ** (np.arange(0, d_kv, 2) / d_kv)
  angle_LK = np.arange(length)[:, None] / timescale_K
  cos_LHK, sin_LHK = np.cos(angle_LK)[:, None, :], np.sin(angle_LK)[:, None, :]
  a_BLHK, b_BLHK = x_BLHK[..., : d_kv // 2], x_BLHK[..., d_kv // 2 :]
  return np.concatenate(
    [
      a_BLHK * cos_LHK - b_BLHK * sin_LHK,
      b_BLHK * cos_LHK + a_BLHK * sin_LHK,
    ],
    axis=-1,
  )


def visible_positions(segments_BL, prefix_BL):
  """Returns whether position L attends to M.

  It does if M is in the same document, and is not later or is in the prefix.
  """
  same_BLM = segments_BL[:, :, None] == segments_BL[:, None, :]
  past_LM = np.tri(segments_BL.shape[1], dtype=bool)
  return same_BLM & (past_LM | (prefix_BL[:, None, :] != 0))


def attend(config, params, layer: str, x_BLD, visible_BLM):
  """Returns causal attention of the normalized x, before the residual add."""
  w_q_DHK = params[f"{layer}/attention/q"]
  w_k_DHK = params[f"{layer}/attention/k"]
  w_v_DHK = params[f"{layer}/attention/v"]
  if config.attention == "multi_query":  # one key and value head for all heads
    w_k_DHK = np.repeat(w_k_DHK[:, None, :], config.num_heads, axis=1)
    w_v_DHK = np.repeat(w_v_DHK[:, None, :], config.num_heads, axis=1)
  q_BLHK = rotate(np.einsum("BLD,DHK->BLHK", x_BLD, w_q_DHK))
  k_BMHK = rotate(np.einsum("BMD,DHK->BMHK", x_BLD, w_k_DHK))
  v_BMHK = np.einsum("BMD,DHK->BMHK", x_BLD, w_v_DHK)
  scores_BHLM = np.einsum("BLHK,BMHK->BHLM", q_BLHK, k_BMHK)
  scores_BHLM = scores_BHLM / np.sqrt(config.d_kv)
  scores_BHLM = np.where(visible_BLM[:, None], scores_BHLM, -np.inf)
  scores_BHLM = scores_BHLM - scores_BHLM.max(axis=-1, keepdims=True)
  weights_BHLM = np.exp(scores_BHLM)
  weights_BHLM = weights_BHLM / weights_BHLM.sum(axis=-1, keepdims=True)
  y_BLHK = np.einsum("BHLM,BMHK->BLHK", weights_BHLM, v_BMHK)
  return np.einsum("BLHK,HKD->BLD", y_BLHK, params[f"{layer}/attention/o"])


def feed_forward(params, layer: str, x_BLD):
  """Returns SwiGLU of the normalized x, before the residual add."""
  gate_BLF = x_BLD @ params[f"{layer}/mlp/wi_gate"]
  swish_BLF = gate_BLF / (1.0 + np.exp(-gate_BLF))
  hidden_BLF = swish_BLF * (x_BLD @ params[f"{layer}/mlp/wi"])
  return hidden_BLF @ params[f"{layer}/mlp/wo"]


def forward(config, params, inputs, segments=None, prefix=None) -> np.ndarray:
  """Returns the logits [B, L, V] of the token after each of `inputs` [B, L]."""
  segments, prefix = (
    np.zeros_like(inputs) if x is None else x for x in (segments, prefix)
  )
  visible_BLM = visible_positions(segments, prefix)
  x_BLD = params["embedding"][inputs]
  for index in range(config.num_layers):
    layer = f"layer_{index:03d}"
    y_BLD = normalize(config, x_BLD, params[f"{layer}/norm/scale"])
    if config.block == "parallel":
      attention_BLD = attend(config, params, layer, y_BLD, visible_BLM)
      x_BLD = x_BLD + feed_forward(params, layer, y_BLD) + attention_BLD
    else:
      x_BLD = x_BLD + attend(config, params, layer, y_BLD, visible_BLM)
      y_BLD = normalize(config, x_BLD, params[f"{layer}/mlp_norm/scale"])
      x_BLD = x_BLD + feed_forward(params, layer, y_BLD)
  x_BLD = normalize(config, x_BLD, params.get("final_norm/scale", 1.0))
  return x_BLD @ params["embedding"].T / np.sqrt(config.d_model)


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
  if loss_weights is None:
    loss_weights = np.ones(targets.shape)
  share_BL = loss_weights / np.sum(loss_weights, dtype=np.float64)
  logits_BLV = forward(config, params, inputs, segments, prefix)
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
  if name.endswith("attention/o"):  # out of heads and their dimensions
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
