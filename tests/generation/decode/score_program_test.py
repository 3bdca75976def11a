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
from tests.blocks import SETTINGS
from tests.cases import slow
from tests.mtf_testing import (
  SINGLE,
  load_decode_model,
  mesh_layout,
  random_tokens,
  small_config,
)


def score(config, params, batch, mesh=SINGLE):
  """Returns -log p of targets; the likeliest tokens, and their -log p."""
  rows, length = batch["inputs"].shape
  names = ["token_loss", "likeliest", "likeliest_loss"]
  with (
    tf.Graph().as_default(),
    tf.Session(config=session_config(mesh.num_devices)) as session,
  ):
    model = build_decode_model(config, mesh, "activation")
    program = LocalPrograms(model).build(ScoreRows(rows, length, names), "")
    load_decode_model(session, model, params)
    feed = {program.inputs[x]: batch[x] for x in ("inputs", "targets")}
    feed[program.inputs["num_given"]] = [0] * rows
    return session.run([program.outputs[x] for x in names], feed)


def case_of(config):
  """Returns parameters, a batch, and the oracle's log p of every token."""
  params = oracle.random_parameters(config, seed=3)
  batch = random_tokens(config, batch_size=2, seed=4)
  logits = oracle.forward(config, params, batch["inputs"])
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  return params, batch, log_p


def gather(log_p, tokens):
  return np.take_along_axis(log_p, tokens, -1)


@pytest.mark.parametrize(
  ("changes", "layout"),
  [
    ({}, None),
    ({"block": "serial", "norm": "rms_norm"}, None),
    ({**SETTINGS["Gemma 3"], "num_layers": 2}, "all over data and model"),
    ({}, "padded vocab over three"),
    # The two cases above have the same collectives.
    slow({}, "vocab over four"),
    slow({}, "two axes but no batch"),
  ],
)
def test_log_p_of_targets_and_of_likeliest_tokens_are_the_oracles(
  changes, layout
):
  config = small_config(**changes)
  params, batch, log_p = case_of(config)
  mesh = mesh_layout(layout) if layout else SINGLE
  loss, likeliest, likeliest_loss = score(config, params, batch, mesh)
  # Per token; some are nearly certain.
  limits = {"rtol": 1e-4, "atol": 1e-5}
  targets = gather(log_p, batch["targets"][..., np.newaxis])[..., 0]
  np.testing.assert_allclose(-loss, targets, **limits)
  best = np.argsort(-log_p, -1)[..., : likeliest.shape[-1]]
  np.testing.assert_array_equal(likeliest, best)
  np.testing.assert_allclose(-likeliest_loss, gather(log_p, best), **limits)
