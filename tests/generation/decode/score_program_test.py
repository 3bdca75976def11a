# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The scoring graph gives the float64 oracle's numbers."""

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.generation.decode.functions import LocalPrograms
from palm_mtf.generation.decode.score_program import ScoreRows
from palm_mtf.generation.decode.weight_maker import build_decode_model
from palm_mtf.mesh.session import session_config
from tests import oracle
from tests.mtf_testing import (
  SINGLE,
  load_decode_model,
  mesh_layout,
  random_tokens,
  small_config,
)


def score(model, rows, length):
  names = ["token_loss", "likeliest", "likeliest_loss"]
  return LocalPrograms(model).build(ScoreRows(rows, length, names), "")


def nats(config, params, batch, mesh=SINGLE):
  rows, length = batch["inputs"].shape
  with (
    tf.Graph().as_default(),
    tf.Session(config=session_config(mesh.num_devices)) as session,
  ):
    model = build_decode_model(config, mesh, "activation")
    program = score(model, rows, length)
    load_decode_model(session, model, params)
    feed = {program.inputs[x]: batch[x] for x in ("inputs", "targets")}
    feed[program.inputs["num_given"]] = [0] * rows
    return session.run(program.outputs["token_loss"], feed)


def expected(config, params, batch):
  return [
    [
      -oracle.log_likelihood(config, params, row[:place], row[place:][:1])
      for place in range(len(row))
    ]
    for row in batch["targets"].tolist()
  ]


@pytest.mark.parametrize(
  ("changes", "layout"),
  [
    ({}, None),
    ({"block": "serial", "norm": "rms_norm"}, None),
    ({"attention": "multi_head"}, "all over data and model"),
    ({}, "vocab over four"),
    ({}, "two axes but no batch"),
    ({}, "padded vocab over three"),
  ],
)
def test_nats_of_every_token_are_the_oracles_in_any_layout(changes, layout):
  config = small_config(**changes)
  params = oracle.random_parameters(config, seed=3)
  batch = random_tokens(config, batch_size=2, seed=4)
  mesh = mesh_layout(layout) if layout else SINGLE
  np.testing.assert_allclose(
    nats(config, params, batch, mesh),
    expected(config, params, batch),
    rtol=1e-4,  # per token; some are nearly certain
    atol=1e-5,
  )


def test_bfloat16_stays_near_the_oracle():
  config = small_config(activation_dtype="bfloat16")
  params = oracle.random_parameters(config, seed=3)
  batch = random_tokens(config, batch_size=2, seed=4)
  exact = expected(config, params, batch)
  # The tolerance of the logits, see model/palm_test.py.
  error = np.linalg.norm(nats(config, params, batch) - exact)
  assert error < 0.02 * np.linalg.norm(exact)


@pytest.mark.parametrize("layout", [None, "padded vocab over three"])
def test_likeliest_tokens_and_their_log_p_are_the_oracles(layout):
  config = small_config()
  params = oracle.random_parameters(config, seed=3)
  batch = random_tokens(config, batch_size=2, seed=4)
  mesh = mesh_layout(layout) if layout else SINGLE
  with (
    tf.Graph().as_default(),
    tf.Session(config=session_config(mesh.num_devices)) as session,
  ):
    model = build_decode_model(config, mesh, "activation")
    program = score(model, *batch["inputs"].shape)
    load_decode_model(session, model, params)
    fetches = [program.outputs[x] for x in ("likeliest", "likeliest_loss")]
    feed = {program.inputs[x]: batch[x] for x in ("inputs", "targets")}
    feed[program.inputs["num_given"]] = [0] * len(batch["inputs"])
    likeliest, loss = session.run(fetches, feed)
  logits = oracle.forward(config, params, batch["inputs"])
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  best = np.argsort(-log_p, -1)[..., : likeliest.shape[-1]]
  np.testing.assert_array_equal(likeliest, best)
  np.testing.assert_allclose(
    -loss, np.take_along_axis(log_p, best, -1), rtol=1e-4, atol=1e-5
  )
