# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A teacher's program gives the float64 oracle's distributions."""

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.generation.decode.functions import LocalPrograms
from palm_mtf.generation.decode.teacher_program import TeachRows
from palm_mtf.generation.decode.weight_maker import build_decode_model
from palm_mtf.mesh.session import session_config
from tests import oracle
from tests.cases import slow
from tests.model.distillation_test import log_softmax
from tests.mtf_testing import (
  SINGLE,
  load_decode_model,
  mesh_layout,
  random_documents,
  small_config,
)

ROWS, COUNT, TEMPERATURE = 4, 6, 1.5


def teach(config, params, batch, targets, mesh=SINGLE):
  """Returns the outputs for the rows of `batch`."""
  length = config.sequence_length
  function = TeachRows(ROWS, length, targets, COUNT, TEMPERATURE)
  with (
    tf.Graph().as_default(),
    tf.Session(config=session_config(mesh.num_devices)) as session,
  ):
    model = build_decode_model(config, mesh, "activation")
    program = LocalPrograms(model).build(function, "")
    load_decode_model(session, model, params)
    feed = {x: batch[name] for name, x in program.inputs.items()}
    return session.run(program.outputs, feed)


@pytest.mark.parametrize(
  ("changes", "layout"),
  [
    ({}, None),
    ({}, "padded vocab over three"),
    # Positions of a document do not depend on its place in the row.
    slow({"positions": "learned", "block": "serial"}, "vocab over four"),
  ],
)
def test_predictions_are_the_oracles(changes, layout):
  """Rows hold two documents and padding."""
  config = small_config(**changes)
  params = oracle.random_parameters(config, seed=3)
  batch = random_documents(config, ROWS, seed=4)
  rng = np.random.default_rng(5)
  batch["uniform"] = np.float32(rng.random(batch["inputs"].shape))
  mesh = mesh_layout(layout) if layout else SINGLE
  logits = oracle.forward(config, params, batch["inputs"], batch["segments"])
  log_p = log_softmax(logits / TEMPERATURE)
  limits = {"rtol": 1e-4, "atol": 1e-4}

  full = teach(config, params, batch, "full", mesh)["teacher_log_p"]
  np.testing.assert_allclose(full[..., :44], log_p, **limits)
  assert (full[..., 44:] < -1e8).all()  # pads the vocabulary

  top = teach(config, params, batch, "top", mesh)
  best = np.argsort(-log_p)[..., :COUNT]
  np.testing.assert_array_equal(top["teacher_ids"], best)
  kept = np.take_along_axis(log_p, best, -1)
  np.testing.assert_allclose(top["teacher_log_p"], kept, **limits)

  drawn = teach(config, params, batch, "sampled", mesh)
  ids = drawn["teacher_ids"]
  kept = np.take_along_axis(log_p, ids, -1)
  np.testing.assert_allclose(drawn["teacher_log_p"], kept, **limits)
  # Each token has its share of draws, rounded up or down.
  shares = COUNT * np.exp(log_p)
  counts = (ids[..., np.newaxis] == np.arange(44)).sum(-2)
  assert (np.abs(counts - shares) < 1 + 1e-4).all()


def test_tokens_are_drawn_as_often_as_they_are_likely():
  """Starts of the draws fill [0, 1) evenly, so shares are exact, not random."""
  rng, num = np.random.default_rng(0), 20_000
  logits = np.float32(2 * rng.standard_normal(12))
  uniform = np.float32((np.arange(num) + 0.5) / num)
  function = TeachRows(1, num, "sampled", COUNT, 1.0)
  with tf.Graph().as_default(), tf.Session() as session:
    rows = tf.constant(np.tile(logits, [1, num, 1]))
    ids, _ = session.run(function._find(rows, tf.constant(uniform[np.newaxis])))
  shares = (ids[0][..., np.newaxis] == np.arange(12)).mean((0, 1))
  np.testing.assert_allclose(shares, np.exp(log_softmax(logits)), atol=1e-4)


def test_a_draw_that_rounds_up_is_no_token_that_pads_the_vocabulary():
  """49 + u is 50 in float32, which is beyond the last token's draws."""
  logits = np.float32([[[2, 1, 1, *[np.finfo(np.float32).min] * 2]]])
  uniform = np.nextafter(np.float32([[1]]), np.float32(0))
  function = TeachRows(1, 1, "sampled", 50, 0.5)
  with tf.Graph().as_default(), tf.Session() as session:
    found = function._find(tf.constant(logits), tf.constant(uniform))
    ids, log_p = session.run(found)
  assert set(ids.ravel()) == {0, 1, 2}
  expected = log_softmax(logits[..., :3] / 0.5)[0, 0, ids]
  np.testing.assert_allclose(log_p, expected, rtol=1e-5)


def test_unlikely_tokens_of_a_large_vocabulary_are_drawn_by_their_share():
  """2e-8 is below the precision of float32 near 1; all together are 0.26%."""
  count, positions = 1000, 20
  p = np.full(1 << 17, 2e-8)
  p[0] = 1 - p[1:].sum()
  logits = np.broadcast_to(np.log(p), [1, positions, len(p)])
  uniform = (np.arange(positions) + 0.5) / positions
  function = TeachRows(1, positions, "sampled", count, 1.0)
  with tf.Graph().as_default(), tf.Session() as session:
    given = (x.astype(np.float32) for x in (logits, uniform[np.newaxis]))
    ids, _ = session.run(function._find(*map(tf.constant, given)))
  share = (ids > 0).mean()
  assert share == pytest.approx(p[1:].sum(), abs=1 / count / positions)
