# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The loss of pairs of answers is that of the DPO paper, wherever it runs."""

import functools

import numpy as np
import pytest

from palm_mtf._tf import mtf, tf
from palm_mtf.config import LossConfig
from palm_mtf.mesh.session import session_config
from palm_mtf.model.dims import model_dims
from palm_mtf.model.palm import Palm
from palm_mtf.model.preference import preference_terms
from palm_mtf.model.weights import TrainedWeights
from palm_mtf.programs.features import find_palm_features
from palm_mtf.programs.loss_function import token_sums
from tests import oracle
from tests.adapter_oracle import slopes_of
from tests.cases import slow
from tests.executors.xla.frozen_test import MESHES
from tests.mtf_testing import (
  load_parameters,
  lower,
  lowered_values,
  placement,
  random_tokens,
  small_config,
)

BETA = 0.3
LOSS = LossConfig(z_loss=1e-3, preference_beta=BETA)


def random_pairs(config, batch_size, seed):
  """Returns rows of two answers, and log ratios of a reference."""
  rng = np.random.default_rng(seed)
  batch = random_tokens(config, batch_size, seed)
  segments = np.zeros_like(batch["inputs"])
  weights = np.zeros(segments.shape, np.float32)
  for row in range(batch_size):
    first, second = rng.integers(2, 5, size=2)
    segments[row, :first] = 1
    segments[row, first : first + second] = 2
    batch["inputs"][row, [0, first]] = 0
    # At least one token of each segment is of the prompt.
    weights[row, 1:first] = 1
    weights[row, first + 1 : first + second] = -1
  reference = rng.normal(size=batch_size).astype(np.float32)
  more = {"segments": segments, "loss_weights": weights, "reference": reference}
  return {**batch, **more}


def log_ratios(config, params, batch):
  """Returns log p of the chosen minus that of the rejected answers, [B]."""
  found = []
  for tokens, segments, weights in zip(
    batch["targets"], batch["segments"], batch["loss_weights"], strict=True
  ):
    found.append(0.0)
    for segment, sign in ((1, 1), (2, -1)):
      own, learned = tokens[segments == segment], weights[segments == segment]
      given, answer = own[learned == 0].tolist(), own[learned != 0].tolist()
      found[-1] += sign * oracle.log_likelihood(config, params, given, answer)
  return np.array(found)


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize(
  ("margin", "expected"), [(0.07288, 0.65737), (-0.004626, 0.69546)]
)
def test_the_loss_of_maxtexts_golden_pairs(margin, expected):
  """PyTorch computed them: golden_dpo_correctness.json in its tests."""
  batch, length = mtf.Dimension("batch", 1), mtf.Dimension("length", 4)
  both = [batch, length]
  found = lowered_values(
    functools.partial(preference_terms, beta=0.1),
    token_loss=(np.float32([[1, 2, 3, 4]]), both),
    loss_weights=(np.float32([[0, 1, 0, -1]]), both),
    # The log ratio is 4 - 2.
    reference=(np.float32([2 - margin / 0.1]), [batch]),
  )
  assert found["loss"][0] == pytest.approx(expected, abs=1e-5)
  assert found["rewards/margins"][0] == pytest.approx(margin, abs=1e-6)
  assert found["rewards/accuracies"][0] == (margin > 0)


def run(config, params, batch, mesh, loss=LOSS):
  """Returns the means of all terms, and all gradients."""
  with tf.Graph().as_default():
    mtf_mesh = mtf.Mesh(mtf.Graph(), "mesh")
    dims = model_dims(config, len(batch["inputs"]), mesh)
    found = find_palm_features([*batch], dims, loss.teacher_tokens)
    features = {
      name: mtf.import_tf_tensor(mtf_mesh, tf.constant(batch[name]), x.shape)
      for name, x in found.items()
    }
    weights = TrainedWeights(mtf_mesh, config, dims, seed=0)
    palm = Palm(config, dims, weights)
    logits = palm.logits(features["inputs"], features["segments"])
    sums = token_sums(logits, features, loss, tf.float32)
    variables = list(mtf_mesh.graph.trainable_variables)
    total = functools.reduce(mtf.add, sums.terms.values()) / sums.weight
    gradients = mtf.gradients([total], [v.value for v in variables])
    fetches = {name: x / sums.weight for name, x in sums.terms.items()}
    names = [f"gradient of {v.name}" for v in variables]
    fetches |= dict(zip(names, gradients, strict=True))
    lowered = lower({mtf_mesh: placement(mesh)}, fetches)
    with tf.Session(config=session_config(mesh.num_devices)) as session:
      load_parameters(session, lowered.slices[0], params)
      values = session.run(lowered.tensors)
  sizes = {f"gradient of {v.name}": v.sizes for v in variables}
  return {
    name: value[tuple(map(slice, sizes[name]))] if name in sizes else value
    for name, value in values.items()
  }


def expected_terms(config, params, batch):
  """Returns the means of all terms in float64."""
  ratios = log_ratios(config, params, batch)
  margins = BETA * (ratios - batch["reference"])
  weights = np.abs(np.float64(batch["loss_weights"]))
  given = batch["inputs"], batch["targets"], LOSS.z_loss, batch["segments"]
  _, z_loss = oracle.loss(config, params, *given, weights)
  return {
    "loss": -np.log(sigmoid(margins)).mean(),
    "rewards/margins": margins.mean(),
    "rewards/accuracies": (margins > 0).mean(),
    "z_loss": weights.mean() * z_loss,  # a mean over all positions
  }


@pytest.mark.parametrize("mesh", ["hosts", slow("hosts, split, microbatches")])
def test_loss_and_gradients_are_those_of_a_float64_oracle(mesh):
  config = small_config()
  params = oracle.random_parameters(config, seed=7)
  batch = random_pairs(config, 4, seed=1)
  found = run(config, params, batch, MESHES[mesh])
  for name, value in expected_terms(config, params, batch).items():
    assert found[name] == pytest.approx(value, rel=1e-4), name

  def losses(params):
    terms = expected_terms(config, params, batch)
    return terms["loss"], terms["z_loss"]

  check_gradients(found, params, losses)


def check_gradients(found, params, losses):
  """Compares the gradients in `found` with slopes of `losses`' sum."""
  for name, (along, slope) in slopes_of(losses, params, params).items():
    gradient = found[f"gradient of {name}"]
    scale = np.linalg.norm(gradient) * np.linalg.norm(along)
    assert abs((gradient * along).sum() - slope) < 1e-5 * scale, name
