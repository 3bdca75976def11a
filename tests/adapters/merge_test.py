# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding multiplies by kernels into which an adapter is merged."""

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.generation.decode.functions import LocalPrograms
from palm_mtf.generation.decode.score_program import ScoreRows
from palm_mtf.generation.decode.weight_maker import build_decode_model
from palm_mtf.mesh.session import session_config
from tests.adapter_oracle import make_case
from tests.cases import slow
from tests.mtf_testing import (
  SINGLE,
  load_decode_model,
  mesh_layout,
  run_model,
)

EVERY = ("q", "k", "v", "o", "wi_gate", "wi", "wo")
DORA = {"adapter": "dora"}
SPLIT = mesh_layout("all over data and model")


def score(case, mesh):
  """Returns -log p of the targets, of merged kernels."""
  rows, length = case.batch["inputs"].shape
  with (
    tf.Graph().as_default(),
    tf.Session(config=session_config(mesh.num_devices)) as session,
  ):
    model = build_decode_model(case.config, mesh, "activation")
    made = ScoreRows(rows, length, ["token_loss"])
    program = LocalPrograms(model).build(made, "")
    load_decode_model(session, model, case.params)
    feed = {program.inputs[x]: case.batch[x] for x in ("inputs", "targets")}
    feed[program.inputs["num_given"]] = [0] * rows
    return session.run(program.outputs["token_loss"], feed)


@pytest.mark.parametrize(
  ("block", "settings", "mesh"),
  [
    ("LLaMA 3", DORA, SINGLE),
    slow("LLaMA 3", {}, SINGLE),
    slow("layer_norm parallel multi_query", DORA, SPLIT),
    slow("GPT-2", DORA, SINGLE),
    slow("Gemma 3", {"adapter_scale": "sqrt_rank"}, SPLIT),
  ],
)
def test_decoding_has_the_papers_log_p(block, settings, mesh):
  """The factors give the same loss, to float32's rounding."""
  case = make_case(block, EVERY, **settings)
  logits = case.logits
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  exact = np.take_along_axis(log_p, case.batch["targets"][..., np.newaxis], -1)
  found = score(case, mesh)
  np.testing.assert_allclose(-found, exact[..., 0], rtol=1e-4, atol=1e-5)
  unmerged = run_model(case.config, case.params, case.batch, backward=False)
  assert np.mean(found) == pytest.approx(unmerged.loss, rel=1e-6)
