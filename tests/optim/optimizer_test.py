# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""AdamW and Muon on random gradients; adafactor_test.py has Adafactor."""

import dataclasses

import numpy as np
import pytest

from palm_mtf.config import AdafactorConfig, AdamwConfig, MeshLayout, MuonConfig
from palm_mtf.optim.optimizer import scale_groups
from tests import optimizer_oracles, oracle
from tests.cases import slow
from tests.mtf_testing import (
  PALM_OPTIMIZER,
  SINGLE,
  relative_error,
  small_config,
)
from tests.optim.random_steps import SHAPES, build_steps, random_run
from tests.settings import ADAMW, MUON

ORACLES = {
  AdamwConfig: optimizer_oracles.Adamw,
  MuonConfig: optimizer_oracles.Muon,
  AdafactorConfig: oracle.Adafactor,
}
FORMS = {
  "AdamW": ADAMW,
  "AdamW, clipped, all decays, a cosine": dataclasses.replace(
    ADAMW,
    gradient_clip=0.01,
    beta2=0.999,
    adam_epsilon=1e-4,
    weight_decay_on="all",
    learning_rate_schedule="cosine",
    learning_rate_decay_steps=80,
  ),
  "AdamW, no momentum, scales decay to 0": dataclasses.replace(
    ADAMW, beta1=0.0, weight_decay_on="all", norm_scale="plain"
  ),
  "Muon": MUON,
  "Muon, clipped, another momentum": dataclasses.replace(
    MUON, gradient_clip=0.01, momentum=0.8, weight_decay_on="all"
  ),
}
MESHES = {
  "one device": SINGLE,
  # Each kernel is split along rows or columns, along its shorter or its longer
  # side, or along both.
  "split": MeshLayout(
    mesh_shape="model:2", layout="heads:model,d_ff:model,vocab:model"
  ),
  "experts": MeshLayout(
    mesh_shape="model:2", layout="experts:model,heads:model"
  ),
  "split twice": MeshLayout(
    mesh_shape="data:2,model:2",
    layout="heads:model,d_ff:model,vocab:model,batch:data,d_model_stored:data",
  ),
}
FAST = [("Muon", "experts"), ("Muon", "split twice")]


@pytest.mark.parametrize(
  ("form", "mesh"),
  [
    slow(form, mesh, unless=mesh == "one device" or (form, mesh) in FAST)
    for form in FORMS
    for mesh in MESHES
  ],
)
def test_100_steps_on_random_gradients_agree_with_a_float64_oracle(form, mesh):
  optimizer = FORMS[form]
  params, gradients = random_run()
  session, run = build_steps(optimizer, MESHES[mesh])
  with session:
    values, norms = run(params, gradients)
  exact = ORACLES[type(optimizer)](optimizer, params)
  for arrays, norm in zip(gradients, norms, strict=True):
    params = exact.step(params, arrays)
    assert norm == pytest.approx(exact.gradient_norm, rel=1e-6)
  expected = params | exact.slots
  assert values.keys() == expected.keys()
  for name, value in expected.items():
    assert relative_error(values[name], value) < 2e-5, name


def test_a_kernel_without_gradients_only_decays():
  """Muon divides by the norm of the momentum, here 0."""
  params, _ = random_run()
  none = {name: np.zeros_like(value) for name, value in params.items()}
  session, run = build_steps(MUON, SINGLE)
  with session:
    values, _ = run(params, [none] * 3)
  for name in SHAPES:
    left = 0.999**3 if name.startswith("layer") and "scale" not in name else 1
    np.testing.assert_allclose(values[name], left * params[name], rtol=1e-6)


FORMS_OF_RULES = {
  "AdamW": FORMS["AdamW, clipped, all decays, a cosine"],
  "Muon": MUON,
  "Adafactor": PALM_OPTIMIZER,
  "Adafactor, factored": dataclasses.replace(
    PALM_OPTIMIZER, second_moment="factored", parameter_scale="stacked"
  ),
}


@pytest.mark.parametrize(
  ("form", "mesh"),
  [slow(form, mesh) for form in FORMS_OF_RULES for mesh in MESHES],
)
def test_zeros_of_kernels_stay_zeros_where_they_are_kept(form, mesh):
  """KEEP_ZEROS: a step is the oracle's, then the mask multiplies kernels.

  The embedding, and the scales of norms, have zeros that train.
  """
  optimizer = dataclasses.replace(FORMS_OF_RULES[form], keep_zeros=True)
  params, gradients = random_run()
  rng, gradients = np.random.default_rng(9), gradients[:20]
  is_kept = {x: rng.random(y.shape) < 0.5 for x, y in params.items()}
  params = {x: np.where(is_kept[x], y, 0.0) for x, y in params.items()}
  session, run = build_steps(optimizer, MESHES[mesh])
  with session:
    values, _ = run(params, gradients)
  exact = ORACLES[type(optimizer)](optimizer, params)
  masks = {x: y for x, y in is_kept.items() if "/w" in x or x.endswith("/o")}
  assert len(masks) == 4
  for arrays in gradients:
    params = exact.step(params, arrays)
    params |= {x: np.where(y, params[x], 0.0) for x, y in masks.items()}
  for name, value in params.items():
    assert relative_error(values[name], value) < 2e-5, name
  for name, mask in masks.items():
    np.testing.assert_array_equal(values[name] != 0.0, mask, err_msg=name)


def test_an_orthogonalized_update_has_singular_values_near_1():
  """As published: between 0.68 and 1.13 or so, for any matrix."""
  rng = np.random.default_rng(0)
  for shape in ((8, 8), (5, 40), (64, 16)):
    x = optimizer_oracles.newton_schulz(rng.standard_normal(shape))
    values = np.linalg.svd(x, compute_uv=False)
    assert 0.5 < values[values > 1e-3].min() and values.max() < 1.3


def test_variables_share_no_sums():
  names = list(oracle.parameter_shapes(small_config()))
  assert [*scale_groups(names, MUON)] == names
