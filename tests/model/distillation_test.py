# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The divergence from a teacher and its gradient are those of the papers."""

import numpy as np
import pytest

from palm_mtf._tf import mtf, tf
from palm_mtf.config import LossConfig
from palm_mtf.model.distillation import teacher_terms
from palm_mtf.model.loss import cross_entropy
from tests import oracle
from tests.cases import slow
from tests.executors.xla.frozen_test import MESHES
from tests.model.preference_test import check_gradients, run
from tests.mtf_testing import lowered_values, random_documents, small_config

KINDS = ("full", "top", "sampled")
TOKENS = 5


def log_softmax(logits):
  logits = np.float64(logits)
  shifted = logits - logits.max(-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def loss_config(kind, temperature=2.0, weight=0.7):
  given = {"targets": kind, "tokens": TOKENS, "weight": weight}
  given = {f"teacher_{x}": y for x, y in given.items()}
  given["teacher_temperature"] = temperature
  return LossConfig(z_loss=1e-3, teacher="a/teacher", **given)


def teach(log_p, kind, seed=0, padded=None):
  """Returns the features of `kind`; log_p is [..., vocab] at temperature T."""
  rng = np.random.default_rng(seed)
  if kind == "full":
    more = (padded or log_p.shape[-1]) - log_p.shape[-1]
    widths = [[0, 0]] * (log_p.ndim - 1) + [[0, more]]
    padded = np.pad(log_p, widths, constant_values=-1e9)
    return {"teacher_log_p": np.float32(padded)}
  if kind == "top":
    ids = np.argsort(-log_p)[..., :TOKENS]
  else:
    draw = lambda x: rng.choice(len(x), TOKENS, p=np.exp(x))  # noqa: E731
    ids = np.apply_along_axis(draw, -1, log_p)
  kept = np.take_along_axis(log_p, ids, -1)
  return {"teacher_ids": np.int32(ids), "teacher_log_p": np.float32(kept)}


def divergence(kind, log_q, log_p, features):
  """Returns D of every position in float64, as the module's page defines it."""
  if kind == "full":
    return (np.exp(log_p) * (log_p - log_q)).sum(-1)
  ids = features["teacher_ids"]
  kept_p, kept_q = (np.take_along_axis(x, ids, -1) for x in (log_p, log_q))
  if kind == "sampled":
    return (kept_p - kept_q).mean(-1)
  others_p, others_q = (1 - np.exp(x).sum(-1) for x in (kept_p, kept_q))
  of_others = others_p * np.log(others_p / others_q)
  return (np.exp(kept_p) * (kept_p - kept_q)).sum(-1) + of_others


def expected_terms(config, params, teacher, batch, loss):
  """Returns the weighted means of all terms in float64."""
  logits, taught = (
    oracle.forward(config, x, batch["inputs"], batch["segments"])
    for x in (params, teacher)
  )
  weights = batch["loss_weights"]
  given = logits, batch["targets"], loss.z_loss, weights
  hard, z_loss = oracle.loss_of_logits(*given)
  temperature = loss.teacher_temperature
  log_q, log_p = (log_softmax(x / temperature) for x in (logits, taught))
  soft = divergence(loss.teacher_targets, log_q, log_p, batch)
  soft = (soft * weights).sum() / weights.sum()
  return {"loss": hard, "z_loss": z_loss, "teacher_loss": soft}


def random_batch(config, teacher, loss, mesh, seed=1, batch_size=4):
  batch = random_documents(config, batch_size, seed=seed)
  logits = oracle.forward(config, teacher, batch["inputs"], batch["segments"])
  log_p = log_softmax(logits / loss.teacher_temperature)
  padded = mesh.padded_vocab_size(config.vocab_size)
  return batch | teach(log_p, loss.teacher_targets, padded=padded)


@pytest.mark.parametrize(
  ("kind", "mesh"),
  [
    *((kind, "hosts") for kind in KINDS),
    *(slow(kind, "hosts, split, microbatches") for kind in KINDS),
  ],
)
def test_terms_and_gradients_are_those_of_a_float64_oracle(kind, mesh):
  """Rows hold two documents and padding; some targets are masked."""
  # A layout that splits the vocabulary pads it to 44 tokens.
  config, layout = small_config(vocab_size=43), MESHES[mesh]
  loss = loss_config(kind)
  params, teacher = (oracle.random_parameters(config, seed=x) for x in (7, 8))
  batch = random_batch(config, teacher, loss, layout)
  found = run(config, params, batch, layout, loss)
  given = teacher, batch, loss
  for name, value in expected_terms(config, params, *given).items():
    assert found[name] == pytest.approx(value, rel=1e-4), name

  def losses(params):
    terms = expected_terms(config, params, *given)
    soft = loss.teacher_weight * loss.teacher_temperature**2
    weights = {"loss": 1 - loss.teacher_weight, "teacher_loss": soft}
    return [weights.get(x, 1) * y for x, y in terms.items()]

  check_gradients(found, params, losses)


def find_gradient(kind, logits, features, **settings):
  """Returns D and its gradient, as training computes them, for one row."""
  loss = loss_config(kind, **{"temperature": 1.0, "weight": 1.0} | settings)
  length, vocab = logits.shape
  dims = [mtf.Dimension("batch", 1), mtf.Dimension("length", length)]
  wide = mtf.Dimension("vocab", vocab)
  kept = mtf.Dimension("teacher_tokens", TOKENS)

  def build(logits, **batch):
    batch["targets"] = mtf.zeros(logits.mesh, dims, tf.int32)
    token_loss, log_z = cross_entropy(logits, batch["targets"])
    given = logits, token_loss, log_z, batch, loss, tf.float32
    terms = teacher_terms(*given)
    total = terms["loss"] + terms["teacher_loss"]
    (gradient,) = mtf.gradients([total], [logits])
    return {"loss": terms["teacher_loss"], "gradient": gradient}

  last = wide if kind == "full" else kept
  found = lowered_values(
    build,
    logits=(np.float32(logits)[np.newaxis], [*dims, wide]),
    **{x: (y[np.newaxis], [*dims, last]) for x, y in features.items()},
  )
  return found["loss"][0], found["gradient"][0]


def test_the_mean_gradient_of_samples_is_the_full_one_and_of_top_is_not():
  """Each of 4,000 positions draws its own tokens from one distribution."""
  rng = np.random.default_rng(0)
  student, teacher = (2 * rng.standard_normal(20) for _ in range(2))
  log_q, log_p = map(log_softmax, (student, teacher))
  full = np.exp(log_q) - np.exp(log_p)  # of the logits
  num = 4000
  rows, taught = (np.tile(x, [num, 1]) for x in (student, log_p))
  losses, each = find_gradient("sampled", rows, teach(taught, "sampled"))
  # The variance of a share of draws is p * (1 - p) / draws.
  sigma = np.sqrt(np.exp(log_p) * (1 - np.exp(log_p)) / (TOKENS * num))
  # Of 20 tokens, one is beyond 3 sigma in 5% of all seeds.
  assert (np.abs(each.mean(0) - full) < 3 * sigma + 1e-6).all()
  kl = (np.exp(log_p) * (log_p - log_q)).sum()
  assert abs(losses.mean() - kl) < 3 * losses.std() / num**0.5
  # "top" does not distinguish the other tokens: it only keeps their sum.
  _, (top,) = find_gradient("top", rows[:1], teach(taught[:1], "top"))
  kept = np.argsort(-teacher)[:TOKENS]
  others = np.setdiff1d(np.arange(20), kept)
  np.testing.assert_allclose(top[kept], full[kept], atol=1e-6)
  assert top[others].sum() == pytest.approx(full[others].sum(), abs=1e-6)
  assert np.abs(top[others] - full[others]).max() > 10 * sigma.max()
  # Without the outcome "any other token", not even the sum would be right.
  naive = np.exp(log_q[others]) * np.exp(log_p[kept]).sum()
  assert abs(naive.sum() - full[others].sum()) > 10 * sigma.max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.25, 1.0, 4.0])
def test_a_model_does_not_differ_from_itself(kind, temperature):
  logits = 5 * np.random.default_rng(1).standard_normal([30, 24])
  log_p = log_softmax(logits / temperature)
  features = teach(log_p, kind)
  found = find_gradient(kind, logits, features, temperature=temperature)
  assert np.abs(found[0]).max() < 1e-5
  if kind != "sampled":  # whose gradient is 0 only on average
    assert np.abs(found[1]).max() < 1e-5


def test_a_teacher_that_knows_nearly_everything_gives_no_nan():
  """Probabilities of all other tokens underflow, in teacher and model."""
  logits = np.zeros([2, 24])
  logits[:, 0] = 300
  for kind in KINDS:
    features = teach(log_softmax(logits * [[1], [-1]]), kind)
    losses, gradient = find_gradient(kind, logits, features)
    assert np.isfinite(losses).all() and np.isfinite(gradient).all()
    assert losses[0] == pytest.approx(0, abs=1e-6)
    assert losses[1] > 60
