# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A Unitransformer of our layers is our own model."""

import numpy as np
import pytest

from palm_mtf._tf import mtf, tf
from tests import oracle
from tests.mtf_testing import (
  SINGLE,
  mesh_layout,
  random_documents,
  random_tokens,
  relative_error,
  run_model,
  small_config,
)
from tests.unitransformer.runs_of_layers import (
  FLOAT32,
  Run,
  configured,
  imported,
  our_name,
)
from tests.unitransformer.simulated_tpus import run_on_simulated_tpus


def tokens_of(config, seed):
  """Returns random_tokens without token 0, which Mesh TensorFlow masks."""
  batch = random_tokens(config, batch_size=4, seed=seed)
  batch["targets"] = np.maximum(batch["targets"], 1)
  batch["inputs"][:, 1:] = batch["targets"][:, :-1]
  return batch


def of_loss(config, mesh, batch, *lines):
  """Returns logits, loss, and gradients by our names."""
  features = imported(mesh, batch)
  with configured(config, *lines) as model:
    logits, loss = model.call_simple(
      features["inputs"],
      features["targets"],
      compute_loss=True,
      variable_dtype=FLOAT32,
      sequence_id=features.get("segments"),
    )
  variables = mesh.graph.trainable_variables
  gradients = mtf.gradients([loss], [x.outputs[0] for x in variables])
  names = [our_name(x.name) for x in variables]
  found = dict(zip(names, gradients, strict=True))
  return {"logits": logits, "loss": loss, **found}


def computed(config, params, batch, *lines):
  """Returns the values of `of_loss` on one device."""

  def build(mesh):
    return of_loss(config, mesh, batch, *lines)

  (values,) = Run(build, params).values
  return values


@pytest.mark.parametrize(
  "form",
  [{}, {"norm": "rms_norm"}, {"block": "serial"}],
  ids=["parallel", "rms_norm", "serial"],
)
def test_logits_loss_and_gradients_are_those_of_our_model_to_1e_5(form):
  config = small_config(**form)
  params = oracle.random_parameters(config, seed=1)
  batch = tokens_of(config, seed=2)
  ours = run_model(config, params, batch)
  theirs = computed(config, params, batch)
  assert relative_error(theirs.pop("logits"), ours.logits) < 1e-5
  assert theirs.pop("loss") == pytest.approx(ours.loss + ours.z_loss, rel=1e-5)
  assert theirs.keys() == ours.gradients.keys()
  for name, gradient in theirs.items():
    assert relative_error(gradient, ours.gradients[name]) < 1e-5, name


def test_documents_of_a_packed_row_have_the_logits_of_our_model():
  config = small_config()
  params = oracle.random_parameters(config, seed=3)
  batch = random_documents(config, batch_size=4, seed=4)
  ours = run_model(config, params, batch, backward=False).logits
  del batch["loss_weights"]
  theirs = computed(config, params, batch)["logits"]
  inside = batch["segments"] > 0
  assert relative_error(theirs[inside], ours[inside]) < 1e-5


def test_bfloat16_activations_agree_with_the_oracle_to_their_8_bits():
  """One rounding is 2^-9 = 0.2%; some twenty meet on the way to a logit."""
  config = small_config()
  params = oracle.random_parameters(config, seed=1)
  inputs = tokens_of(config, seed=2)["inputs"]

  def build(mesh):
    with configured(config) as model:
      logits, _ = model.call_simple(
        imported(mesh, {"inputs": inputs})["inputs"],
        None,
        compute_loss=False,
        variable_dtype=mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16),
      )
    return {"logits": mtf.cast(logits, tf.float32)}

  (values,) = Run(build, params).values
  exact = oracle.forward(config, params, inputs)
  assert relative_error(values["logits"], exact) < 0.02


def trained(config, params, batch, layout):
  """Returns the losses of steps on one batch, and each step's gradients."""

  def build(mesh):
    gradients = of_loss(config, mesh, batch)
    variables = mesh.graph.trainable_variables
    optimizer = mtf.optimize.AdafactorOptimizer(learning_rate=0.02)
    optimizer.apply_grads(
      [gradients[our_name(x.name)] for x in variables], variables
    )
    return gradients

  return Run(build, params, layout, num_steps=12).values


def test_training_on_a_mesh_that_splits_batch_and_model_is_that_of_one_device():
  config = small_config(num_layers=1)
  params = oracle.random_parameters(config, seed=5)
  batch = tokens_of(config, seed=6)
  one = trained(config, params, batch, SINGLE)
  four = trained(config, params, batch, mesh_layout("all over data and model"))
  for name, value in one[0].items():
    assert relative_error(four[0][name], value) < 1e-5, name
  losses = [[step["loss"] for step in steps] for steps in (one, four)]
  np.testing.assert_allclose(*losses, rtol=1e-3)
  assert losses[0][-1] < 0.5 * losses[0][0]


def test_each_device_of_mesh_tensorflow_s_tpu_program_has_what_one_cpu_has():
  config = small_config(num_layers=1)
  params = oracle.random_parameters(config, seed=7)
  batch = tokens_of(config, seed=8)
  one = computed(config, params, batch)
  devices = run_on_simulated_tpus(
    lambda mesh: of_loss(config, mesh, batch),
    params,
    "all over data and model",
  )
  assert len(devices) == 4
  for values in devices:
    for name, value in one.items():
      assert relative_error(values[name], value) < 1e-5, name


@pytest.mark.slow
def test_layers_that_are_computed_again_have_the_same_gradients():
  config = small_config()
  params = oracle.random_parameters(config, seed=9)
  batch = tokens_of(config, seed=10)
  kept = computed(config, params, batch)
  again = computed(
    config, params, batch, "transformer.LayerStack.recompute_grads = True"
  )
  for name, value in kept.items():
    assert relative_error(again[name], value) < 1e-5, name


@pytest.mark.slow
def test_a_mesh_that_splits_positions_gives_what_one_device_does():
  config = small_config(sequence_length=8)
  params = oracle.random_parameters(config, seed=11)
  batch = tokens_of(config, seed=12)
  one = computed(config, params, batch)
  layout = mesh_layout("all over data and model")
  # No layout of ours.
  object.__setattr__(layout, "layout", "batch:data,length:model")
  (four,) = Run(
    lambda mesh: of_loss(config, mesh, batch), params, layout
  ).values
  for name, value in one.items():
    assert relative_error(four[name], value) < 1e-5, name
