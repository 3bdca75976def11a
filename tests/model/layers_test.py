# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Claims about single layers that the whole model's tests do not reach."""

import numpy as np
import pytest
import tensorflow as tf2

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.block import NORMS
from palm_mtf.architecture.rotary import Rotary
from palm_mtf.checkpoints.variables import WeightsCopier
from palm_mtf.config import DecodeConfig, MeshLayout
from palm_mtf.mesh.session import session_config
from palm_mtf.model.layers import embed, norm
from palm_mtf.model.loss import cross_entropy, weight_sum, weighted_mean
from palm_mtf.model.positions import rotate_pairs, sines_and_cosines
from palm_mtf.programs.train_program import build_train_program
from palm_mtf.runtime.client.client import Client
from palm_mtf.training.step import TrainStep
from tests import oracle
from tests.cases import slow
from tests.decode_testing import decode
from tests.mtf_testing import (
  SINGLE,
  lowered_values,
  random_tokens,
  small_config,
)
from tests.settings import step_config

BATCH = mtf.Dimension("batch", 2)
LENGTH = mtf.Dimension("length", 6)
D_MODEL = mtf.Dimension("d_model", 8)
VOCAB = mtf.Dimension("vocab", 12)

VOCAB_SPLIT = MeshLayout(mesh_shape="model:4", layout="vocab:model")
BATCH_SPLIT = MeshLayout(mesh_shape="data:2", layout="batch:data")


@pytest.mark.parametrize("mesh", [SINGLE, VOCAB_SPLIT], ids=["one", "split"])
def test_cross_entropy_of_huge_logits_is_finite_and_exact(mesh):
  rng = np.random.default_rng(0)
  logits = (1e4 * rng.standard_normal([2, 6, 12])).astype(np.float32)
  targets = rng.integers(12, size=[2, 6], dtype=np.int32)

  def build(logits, targets):
    nats, log_z = cross_entropy(logits, targets)
    total = mtf.reduce_sum(nats) + mtf.reduce_sum(mtf.square(log_z))
    (gradient,) = mtf.gradients([total], [logits])
    return {"nats": nats, "log_z": log_z, "gradient": gradient}

  seen = lowered_values(
    build,
    mesh,
    logits=(logits, [BATCH, LENGTH, VOCAB]),
    targets=(targets, [BATCH, LENGTH]),
  )
  exact = logits.astype(np.float64)
  shifted = exact - exact.max(-1, keepdims=True)
  log_z = exact.max(-1) + np.log(np.exp(shifted).sum(-1))
  target = np.take_along_axis(exact, targets[..., None], -1)[..., 0]
  softmax = np.exp(exact - log_z[..., None])
  gradient = softmax * (1 + 2 * log_z)[..., None] - np.eye(12)[targets]
  np.testing.assert_allclose(seen["log_z"], log_z, rtol=1e-6)
  np.testing.assert_allclose(seen["nats"], log_z - target, rtol=1e-5, atol=1e-2)
  np.testing.assert_allclose(seen["gradient"], gradient, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("mesh", [SINGLE, VOCAB_SPLIT], ids=["one", "split"])
def test_embedding_gradient_of_a_frequent_token_is_summed_in_float32(mesh):
  """A bfloat16 sum of 2,048 ones would stop at 256."""
  length = mtf.Dimension("length", 1024)
  tokens = np.full([2, 1024], 7, np.int32)
  ones = np.ones([2, 1024, 8], np.float32)

  def build(table, tokens, ones):
    table = mtf.cast(table, tf.bfloat16)
    y = embed(table, tokens) * mtf.cast(ones, tf.bfloat16)
    (gradient,) = mtf.gradients([y], [table], grad_ys=[mtf.ones_like(y)])
    return {"gradient": gradient}

  gradient = lowered_values(
    build,
    mesh,
    table=(np.zeros([12, 8], np.float32), [VOCAB, D_MODEL]),
    tokens=(tokens, [BATCH, length]),
    ones=(ones, [BATCH, length, D_MODEL]),
  )["gradient"]
  expected = np.zeros([12, 8])
  expected[7] = 2048
  np.testing.assert_array_equal(gradient, expected)


def test_rotary_tables_tell_position_256_from_257_in_bfloat16():
  with tf.Graph().as_default(), tf.Session() as session:
    rotary = Rotary(4, "halves", 10_000.0)
    angles = sines_and_cosines(258, rotary)
    turned = rotate_pairs(tf.ones([258, 4], tf.bfloat16), *angles, rotary)
    y = session.run(tf.cast(turned, tf.float32))
  angle = np.array([256.0, 257.0])
  expected = np.cos(angle) - np.sin(angle)
  np.testing.assert_allclose(y[256:, 0], expected, atol=0.01)


@pytest.mark.parametrize("mesh", [SINGLE, BATCH_SPLIT], ids=["one", "split"])
def test_the_weighted_mean_is_over_the_whole_batch(mesh):
  """It is not the mean of slices' means, because the rows' weights differ."""
  x = np.arange(12, dtype=np.float32).reshape([2, 6])
  weights = np.float32([[0, 0, 0, 0, 0, 0.5], [1, 1, 0, 1, 2, 0]])

  def build(x, weights):
    mean = weighted_mean(x, weights)
    (gradient,) = mtf.gradients([mean], [x])
    total = weight_sum(x, weights)
    return {"mean": mean, "gradient": gradient, "total": total}

  dims = [BATCH, LENGTH]
  seen = lowered_values(build, mesh, x=(x, dims), weights=(weights, dims))
  assert seen["total"] == 5.5
  assert seen["mean"] == pytest.approx(np.average(x, weights=weights))
  np.testing.assert_allclose(seen["gradient"], weights / 5.5, rtol=1e-6)


def test_the_mean_of_a_batch_without_weight_is_zero_and_has_no_gradient():
  def build(x, weights):
    mean = weighted_mean(x, weights)
    (gradient,) = mtf.gradients([mean], [x])
    return {"mean": mean, "gradient": gradient}

  x, weights = (np.full([2, 6], i, np.float32) for i in (1, 0))
  dims = [BATCH, LENGTH]
  seen = lowered_values(build, x=(x, dims), weights=(weights, dims))
  assert seen["mean"] == 0
  assert not seen["gradient"].any()


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_norm_keeps_float32_statistics_of_bfloat16_activations(kind):
  """For x = 64 + small noise, bfloat16 sums would lose the noise."""
  rng = np.random.default_rng(3)
  noise = rng.choice([-0.5, 0.5], size=[2, 6, 8]).astype(np.float32)
  x = 64 + noise  # exact in bfloat16
  y = lowered_values(
    lambda x, scale: {
      "y": norm(mtf.cast(x, tf.bfloat16), [scale], NORMS[kind], 1e-6)
    },
    x=(x, [BATCH, LENGTH, D_MODEL]),
    scale=(np.ones(8, np.float32), [D_MODEL]),
  )["y"]
  exact = x - x.mean(-1, keepdims=True) if kind == "layer_norm" else x
  exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6)
  np.testing.assert_allclose(y, exact, rtol=2**-8)


# 44 tokens in 48 rows, 6 on each: the last device has 2 tokens, 4 of padding.
EIGHT = MeshLayout(mesh_shape="model:8", layout="vocab:model")
# 4 tokens in 6 rows, 2 on each of 3 devices: the last has only padding.
THREE = MeshLayout(mesh_shape="model:3", layout="vocab:model")


@pytest.mark.parametrize(
  ("mesh", "vocab_size", "rows"), [slow(EIGHT, 44, 6), (THREE, 4, 2)]
)
def test_padding_stays_zero_and_no_checkpoint_holds_it(
  mesh, vocab_size, rows, tmp_path
):
  config = small_config(num_layers=1, vocab_size=vocab_size)
  with (
    tf.Graph().as_default(),
    tf.Session(config=session_config(mesh.num_devices)) as session,
  ):
    given = step_config(config, mesh)
    program = build_train_program(given, batch_size=2, seed=0)
    session.run(program.initialize)
    for i in range(2):
      TrainStep(Client(session), program).run(random_tokens(config, 2, i), i)
    parts = program.slices["embedding"]
    slices = [session.run(x.variable.read_value()) for x in parts]
    WeightsCopier(Client(session), [program.slices]).copy()(str(tmp_path / "a"))
  table = np.concatenate(slices)
  assert [len(x) for x in slices] == [rows] * mesh.num_devices
  assert table[:vocab_size].all(axis=1).all()
  assert not table[vocab_size:].any()
  reader = tf2.train.load_checkpoint(str(tmp_path / "a"))
  for name, shape in reader.get_variable_to_shape_map().items():
    if name.startswith("embedding"):
      assert shape == [vocab_size, config.d_model], name
  saved = reader.get_tensor("embedding")
  np.testing.assert_array_equal(saved, table[:vocab_size])


@pytest.mark.parametrize(
  "settings",
  [
    # Tokens are almost equally likely: 2 of 15 draws would fall on padding.
    DecodeConfig(temperature=100.0, num_samples=8, repetition_penalty=1.1),
    slow(DecodeConfig(num_beams=2)),
  ],
  ids=["samples", "beams"],
)
def test_padding_is_never_chosen(settings):
  config = small_config(num_layers=1, vocab_size=13, sequence_length=16)
  params = oracle.random_parameters(config, seed=2)
  found = decode(config, params, [[5, 9]], settings, max_tokens=12, mesh=THREE)
  assert found.tokens.max() < 13
