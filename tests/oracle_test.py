# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The oracles agree with each other, with Optax and with what PaLM states."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from palm_mtf.config import ModelConfig
from tests import optimizer_oracles, oracle, oracle_jax
from tests.blocks import PALM
from tests.cases import slow
from tests.settings import ADAMW, MUON, PALM_OPTIMIZER

BATCH, LENGTH = 2, 7
SMALL = ModelConfig(
  num_layers=2,
  d_model=12,
  num_heads=3,
  d_kv=6,
  d_ff=20,
  vocab_size=17,
  sequence_length=LENGTH,
)
FIRST, *MIXED, LAST = (x for x in PALM if x != "no final scale")
Z_LOSS = 0.03  # large enough that its gradient matters

SEGMENTS = np.array([[1, 1, 1, 2, 2, 3, 0], [4, 4, 5, 5, 5, 5, 5]])
LOSS_WEIGHTS = np.array([[0, 1, 1, 0.5, 1, 2, 0], [0, 1, 0, 0, 1, 1, 0.25]])
PREFIX = np.array([[1, 1, 0, 1, 1, 1, 0], [1, 0, 1, 1, 1, 1, 0]])


def tokens(seed):
  rng = np.random.default_rng(seed)
  return rng.integers(0, SMALL.vocab_size, (2, BATCH, LENGTH))


@pytest.mark.parametrize(
  "name",
  [
    FIRST,
    LAST,  # makes every other choice
    *(slow(x) for x in MIXED),
  ],
)
@pytest.mark.parametrize(
  "masks",
  [(), (SEGMENTS, LOSS_WEIGHTS, PREFIX)],
  ids=["whole rows", "segments, weights and prefixes"],
)
def test_logits_agree_and_jax_gradients_are_the_slopes_of_the_numpy_loss(
  name, masks
):
  config = dataclasses.replace(SMALL, **PALM[name])
  params = oracle.random_parameters(config, seed=3)
  inputs, targets = tokens(seed=4)
  attention_masks = masks[::2]
  logits = oracle.forward(config, params, inputs, *attention_masks)
  assert logits.shape == (BATCH, LENGTH, config.vocab_size)
  np.testing.assert_allclose(
    oracle_jax.forward(config, params, inputs, *attention_masks),
    logits,
    rtol=1e-12,
    atol=1e-12,
  )
  args = inputs, targets, Z_LOSS, *masks
  *terms, gradients = oracle_jax.loss_and_gradients(config, params, *args)
  np.testing.assert_allclose(
    terms, oracle.loss(config, params, *args), rtol=1e-12
  )
  assert {n: g.shape for n, g in gradients.items()} == (
    oracle.parameter_shapes(config)
  )
  rng = np.random.default_rng(5)
  # The slope along one direction sums up every gradient.
  direction = {n: rng.standard_normal(p.shape) for n, p in params.items()}
  losses = [
    sum(
      oracle.loss(
        config, {n: p + step * direction[n] for n, p in params.items()}, *args
      )
    )
    for step in (-1e-6, 1e-6)
  ]
  slope = sum(np.sum(g * direction[n]) for n, g in gradients.items())
  np.testing.assert_allclose(slope, np.diff(losses)[0] / 2e-6, rtol=1e-6)


def test_given_tokens_see_each_other_and_no_token_sees_a_later_target():
  params = oracle.random_parameters(SMALL, seed=22)
  inputs, _ = tokens(seed=23)
  prefix = np.zeros_like(inputs)
  prefix[:, :4] = 1
  before = oracle.forward(SMALL, params, inputs, prefix=prefix)
  for place, first in ((3, 0), (5, 5)):  # (changed token, first changed logits)
    other = inputs.copy()
    other[:, place] = (other[:, place] + 1) % SMALL.vocab_size
    after = oracle.forward(SMALL, params, other, prefix=prefix)
    same = (before == after).all((0, 2))
    assert same[:first].all() and not same[first:].any()


def test_the_jax_oracle_leaves_other_jax_code_in_float32():
  params = oracle.random_parameters(SMALL, seed=1)
  logits = oracle_jax.forward(SMALL, params, tokens(seed=2)[0])
  assert logits.dtype == np.float64
  assert jax.numpy.ones(1).dtype == np.float32


def some_parameters(seed):
  """Three variables; the root mean square of "tiny" is below 1e-3."""
  rng = np.random.default_rng(seed)
  sizes = {"matrix": ((4, 5), 1.0), "vector": ((6,), 3.0), "tiny": ((3,), 1e-5)}
  return {n: s * rng.standard_normal(d) for n, (d, s) in sizes.items()}


@pytest.mark.parametrize(
  "changes",
  [
    {"beta1": 0.9},
    {"beta1": 0.9, "second_moment": "factored"},
    {"beta1": 0.0, "second_moment": "factored", "update_clip": None},
    {"beta1": 0.0, "parameter_scale": "off"},
  ],
  ids=str,
)
def test_adafactor_takes_the_steps_of_optax(changes):
  # lr = 0.4 until step 6, 1 / sqrt(k) from step 7; Optax has no decay by lr**2.
  settings = dataclasses.replace(
    PALM_OPTIMIZER,
    learning_rate=0.4,
    weight_decay_exponent=None,
    **changes,
  )
  theirs = optax.chain(
    optax.clip_by_global_norm(settings.gradient_clip),
    optax.adafactor(
      # Optax counts steps from 0.
      lambda n: jax.numpy.minimum(0.4, (n + 1.0) ** -0.5),
      min_dim_size_to_factor=1,
      decay_rate=settings.beta2_exponent,
      multiply_by_parameter_scale=settings.parameter_scale != "off",
      clipping_threshold=settings.update_clip,
      momentum=settings.beta1 or None,
      factored=settings.second_moment == "factored",
    ),
  )
  params = our_params = some_parameters(seed=15)
  ours = oracle.Adafactor(settings, params)
  norms = []
  with jax.enable_x64(True):
    state = theirs.init(jax.tree.map(jax.numpy.asarray, params))
    update = jax.jit(theirs.update)
    for k in range(1, 21):
      gradients = {
        n: g * 0.1 * (1 + k % 4) for n, g in some_parameters(k).items()
      }
      our_params = ours.step(our_params, gradients)
      updates, state = update(gradients, state, params)
      params = optax.apply_updates(params, updates)
      norms.append(ours.gradient_norm)
      # Optax computes beta1, beta2 and lr in float32.
      for name, value in params.items():
        error = np.linalg.norm(our_params[name] - value)
        assert error < 1e-6 * np.linalg.norm(value), (name, k)
  assert min(norms) < settings.gradient_clip < max(norms)
  assert ours.learning_rate == 20**-0.5


def test_adafactor_without_gradients_shrinks_parameters_by_lr_squared():
  settings = dataclasses.replace(PALM_OPTIMIZER, learning_rate=0.5)
  params = start = some_parameters(seed=18)
  adafactor = oracle.Adafactor(settings, params)
  zeros = jax.tree.map(np.zeros_like, params)
  for _ in range(6):
    params = adafactor.step(params, zeros)
  # lr**2 is 1/4 in steps 1 to 4, then 1/5 and 1/6.
  left = 0.75**4 * (4 / 5) * (5 / 6)
  for name, value in params.items():
    np.testing.assert_allclose(value, left * start[name], rtol=1e-13)


def random_steps(seed):
  """Returns parameters, and gradients with norms around the clipping norm."""
  rng = np.random.default_rng(seed)
  shapes = {
    "embedding": (5, 4),
    "layer_000/mlp/wi": (4, 7),
    "layer_000/mlp/wo": (7, 4),
    "final_norm/scale": (4,),
  }

  def draw(size):
    return {n: size * rng.standard_normal(x) for n, x in shapes.items()}

  return draw(1.0), [draw(0.05 * (1 + k % 4)) for k in range(100)]


def test_adamw_takes_the_steps_of_optax():
  settings = dataclasses.replace(ADAMW, weight_decay_on="all")
  settings = dataclasses.replace(settings, norm_scale="plain", beta2=0.999)
  theirs = optax.chain(
    optax.clip_by_global_norm(settings.gradient_clip),
    optax.adamw(1e-2, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.1),
  )
  params, gradients = random_steps(seed=4)
  ours, our_params, norms = (
    optimizer_oracles.Adamw(settings, params),
    params,
    [],
  )
  with jax.enable_x64(True):
    state = theirs.init(jax.tree.map(jax.numpy.asarray, params))
    update = jax.jit(theirs.update)
    for each in gradients:
      our_params = ours.step(our_params, each)
      updates, state = update(each, state, params)
      params = optax.apply_updates(params, updates)
      norms.append(ours.gradient_norm)
  assert min(norms) < settings.gradient_clip < max(norms)
  for name, value in params.items():
    np.testing.assert_allclose(our_params[name], value, rtol=1e-9)


@pytest.mark.peers
def test_muon_takes_the_steps_of_pytorch(monkeypatch):
  """Its matrix products, in bfloat16, are made in float64 here."""
  import torch

  monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)
  settings = dataclasses.replace(MUON, norm_scale="plain", gradient_clip=1e9)
  params, gradients = random_steps(seed=5)
  theirs = {n: torch.tensor(x, requires_grad=True) for n, x in params.items()}
  kernels = [x for n, x in theirs.items() if n.startswith("layer")]
  others = [x for n, x in theirs.items() if not n.startswith("layer")]
  rates = {"lr": settings.learning_rate}
  both = [
    torch.optim.Muon(
      kernels, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", **rates
    ),
    torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, **rates),
  ]
  ours = optimizer_oracles.Muon(settings, params)
  for each in gradients:
    params = ours.step(params, each)
    for name, x in theirs.items():
      x.grad = torch.tensor(each[name])
    for x in both:
      x.step()
  for name, value in params.items():
    found = theirs[name].detach().numpy()
    np.testing.assert_allclose(found, value, rtol=1e-9, atol=1e-12)
