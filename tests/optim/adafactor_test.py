# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Every form of Adafactor, and its clipping, on random gradients."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.config import MeshLayout
from palm_mtf.optim import schedule
from palm_mtf.optim.adafactor import one_minus_beta2
from palm_mtf.optim.optimizer import is_decayed, scale_groups
from tests import oracle
from tests.cases import slow
from tests.mtf_testing import (
  PALM_OPTIMIZER,
  SINGLE,
  oracle_slots,
  relative_error,
  small_config,
)
from tests.optim.random_steps import build_steps, random_arrays, random_run

MESHES = {
  "one device": SINGLE,
  "split": MeshLayout(
    mesh_shape="model:2", layout="heads:model,d_ff:model,vocab:model"
  ),
}
PALM, CLIPPED = "PaLM's settings", "both clips at work"
PLAIN = "scales of norms as they multiply, no update clip, a high floor"
BFLOAT16 = "momentum in bfloat16"
FORMS = {
  PALM: {},
  CLIPPED: {"gradient_clip": 0.01, "update_clip": 0.3},
  "other exponents, no momentum": {
    "beta1": 0.0,
    "beta2_exponent": 0.6,
    "weight_decay_exponent": 1.5,
  },
  f"factored, {CLIPPED}": {
    "second_moment": "factored",
    "gradient_clip": 0.01,
    "update_clip": 0.3,
  },
  "factored, no momentum, no clip, no scale, no decay": {
    "second_moment": "factored",
    "beta1": 0.0,
    "update_clip": None,
    "parameter_scale": "off",
    "weight_decay_exponent": None,
  },
  "no scale, constant rate, no decay of scales": {
    "parameter_scale": "off",
    "learning_rate": 2e-3,
    "learning_rate_schedule": "constant",
    "weight_decay_exponent": 1.0,
    "weight_decay_on": "all_but_scales",
  },
  "stacked scale, decay of kernels alone": {
    "parameter_scale": "stacked",
    "update_clip": 0.5,
    "weight_decay_exponent": 1.0,
    "weight_decay_on": "kernels",
  },
  PLAIN: {
    "norm_scale": "plain",
    "update_clip": None,
    "parameter_scale_floor": 0.7,
  },
  "stacked scale, factored": {
    "parameter_scale": "stacked",
    "second_moment": "factored",
    "update_clip": 0.5,
  },
}


@pytest.fixture(scope="module")
def steps_of():
  """A function of a form and a mesh, which builds each graph once."""
  sessions = []

  @functools.cache
  def get(form, mesh):
    settings = {**FORMS, BFLOAT16: {"momentum_dtype": "bfloat16"}}[form]
    optimizer = dataclasses.replace(PALM_OPTIMIZER, **settings)
    session, run = build_steps(optimizer, MESHES[mesh])
    sessions.append(session)
    return run

  yield get
  for session in sessions:
    session.close()


# Both meshes have the same operations except sums over slices. The steps of
# train_program_test.py have the other forms.
FAST = {
  (PALM, "one device"),
  ("factored, no momentum, no clip, no scale, no decay", "one device"),
  ("no scale, constant rate, no decay of scales", "one device"),
  (CLIPPED, "split"),
  (f"factored, {CLIPPED}", "split"),
  ("stacked scale, decay of kernels alone", "split"),
  (PLAIN, "split"),
}


@pytest.mark.parametrize(
  ("form", "mesh"),
  [slow(*x, unless=x in FAST) for x in itertools.product(FORMS, MESHES)],
)
def test_100_steps_on_random_gradients_agree_with_the_float64_oracle(
  form, mesh, steps_of
):
  optimizer = dataclasses.replace(PALM_OPTIMIZER, **FORMS[form])
  params, gradients = random_run()
  values, norms = steps_of(form, mesh)(params, gradients)
  adafactor = oracle.Adafactor(optimizer, params)
  for arrays, norm in zip(gradients, norms, strict=True):
    params = adafactor.step(params, arrays)
    assert norm == pytest.approx(adafactor.gradient_norm, rel=1e-6)
  slots = oracle_slots(adafactor)
  assert values.keys() == params.keys() | slots.keys()
  for name, param in params.items():
    assert relative_error(values[name], param) < 2e-6, name
  for name, slot in slots.items():
    value = values[name].reshape(slot.shape)
    assert relative_error(value, slot) < 1e-5, name


@pytest.mark.parametrize("schedule_name", ["palm", "constant"])
def test_a_rate_of_zero_changes_no_parameter(schedule_name):
  optimizer = dataclasses.replace(
    PALM_OPTIMIZER, learning_rate=0.0, learning_rate_schedule=schedule_name
  )
  params, gradients = random_run()
  session, run = build_steps(optimizer, SINGLE)
  with session:
    values, norms = run(params, gradients[:3])
  assert all(norms)
  for name, param in params.items():
    np.testing.assert_array_equal(values[name], np.float32(param))


@pytest.mark.parametrize(
  ("form", "mesh", "center"), [(PALM, "one device", 1.0), (PLAIN, "split", 0.0)]
)
def test_without_gradients_a_norm_s_scale_decays_to_its_center(
  form, mesh, center, steps_of
):
  """Others decay to 0: p - center shrinks by lr^2 = 1e-4 per step."""
  params = random_arrays(0, {})
  none = {name: np.zeros_like(value) for name, value in params.items()}
  values, _ = steps_of(form, mesh)(params, [none] * 50)
  for name, value in params.items():
    middle = center if name.endswith("/scale") else 0.0
    expected = middle + (value - middle) * (1 - 1e-4) ** 50
    np.testing.assert_allclose(values[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mesh", ["one device", slow("split")])
def test_momentum_in_bfloat16_stays_within_its_rounding(mesh, steps_of):
  params, gradients = random_run()
  exact, _ = steps_of(PALM, mesh)(params, gradients)
  rounded, _ = steps_of(BFLOAT16, mesh)(params, gradients)
  for name in params:
    one, other = (v[f"{name}/momentum"] for v in (exact, rounded))
    assert 0 < relative_error(other, one) < 2**-7, name
    change = exact[name] - params[name]
    assert relative_error(rounded[name] - params[name], change) < 2**-7, name


def computed(schedule_of, k, **changes):
  """Returns a number of the schedule at step k."""
  optimizer = dataclasses.replace(PALM_OPTIMIZER, **changes)
  with tf.Graph().as_default(), tf.Session() as session:
    return session.run(schedule_of(tf.constant(k, tf.float32), optimizer))


@pytest.mark.parametrize("k", [1, 100, 9_999, 10_000, 10_001, 255_000])
def test_schedule_is_the_paper_s(k):
  """lr = 1e-2 for 10,000 steps, then 1/sqrt(k); beta2 = 1 - k^-0.8."""
  rate = computed(schedule.learning_rate, k)
  assert rate == pytest.approx(1e-2 if k <= 10_000 else k**-0.5, rel=1e-6)
  decay = computed(one_minus_beta2, k)
  assert decay == pytest.approx(k**-0.8, rel=1e-5)
  constant = dict(learning_rate=5e-5, learning_rate_schedule="constant")
  rate = computed(schedule.learning_rate, k, **constant)
  assert rate == pytest.approx(5e-5, rel=1e-6)


@pytest.mark.parametrize(
  ("k", "share"),
  [
    (0, 1.0),
    (250, 0.1 + 0.9 * 0.8535534),
    (500, 0.55),
    (1000, 0.1),
    (2000, 0.1),
  ],
)
def test_a_cosine_falls_to_a_tenth_in_its_steps_and_stays_there(k, share):
  """Hoffmann et al. 2022, section 3.1; (1 + cos(pi / 4)) / 2 = 0.8535534."""
  falling = {"learning_rate": 0.05, "learning_rate_decay_steps": 1000}
  falling["learning_rate_schedule"] = "cosine"
  rate = computed(schedule.learning_rate, k, **falling)
  assert rate == pytest.approx(0.05 * share, rel=1e-5)


NAMES = list(oracle.parameter_shapes(small_config(block="serial")))


def groups_of(parameter_scale):
  """Returns indices in NAMES."""
  settings = {"parameter_scale": parameter_scale}
  optimizer = dataclasses.replace(PALM_OPTIMIZER, **settings)
  return [*scale_groups(NAMES, optimizer).values()]


def test_each_variable_has_its_own_scale_unless_they_are_stacked():
  alone = [[i] for i in range(len(NAMES))]
  assert groups_of("variable") == groups_of("off") == alone


def test_stacked_matrices_are_those_of_the_published_inference_code():
  groups = groups_of("stacked")
  assert [[NAMES[i] for i in group] for group in groups] == [
    ["embedding"],
    ["layer_000/norm/scale", "layer_001/norm/scale"],
    [
      f"layer_00{i}/{kernel}"
      for i in range(2)
      for kernel in ("attention/q", "mlp/wi_gate", "mlp/wi")
    ],
    [f"layer_00{i}/attention/{kernel}" for i in range(2) for kernel in "kv"],
    [f"layer_00{i}/{x}" for i in range(2) for x in ("attention/o", "mlp/wo")],
    ["layer_000/mlp_norm/scale", "layer_001/mlp_norm/scale"],
    ["final_norm/scale"],
  ]


@pytest.mark.parametrize(
  ("weight_decay_on", "spared"),
  [
    ("all", []),
    ("all_but_scales", [n for n in NAMES if n.endswith("scale")]),
    ("kernels", [n for n in NAMES if n.endswith(("scale", "embedding"))]),
  ],
)
def test_what_does_not_decay(weight_decay_on, spared):
  assert spared == [n for n in NAMES if not is_decayed(n, weight_decay_on)]
