# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Chunked cross-attention (Borgeaud et al. 2022)."""

import dataclasses

import numpy as np
import pytest

from tests import neighbours_oracle
from tests.blocks import Z_LOSS, check
from tests.mtf_testing import SINGLE, mesh_layout, run_model
from tests.neighbours_cases import CONFIG, make_batch, make_case


@pytest.mark.parametrize(
  ("changes", "layout"),
  [
    ({}, None),
    pytest.param(
      {"block": "serial", "attention": "multi_head", "remat": "layer"},
      "PaLM's 2D",
      marks=pytest.mark.slow,
    ),
    pytest.param({"positions": "none"}, None, marks=pytest.mark.slow),
  ],
)
def test_logits_and_gradients_are_those_of_the_paper(changes, layout):
  config = dataclasses.replace(CONFIG, **changes)
  case = make_case(config)
  mesh = mesh_layout(layout) if layout else SINGLE
  result = run_model(config, case.params, case.batch, mesh=mesh, z_loss=Z_LOSS)
  check(case, result)


def test_a_token_changes_no_logits_before_it_nor_through_its_neighbours():
  params = neighbours_oracle.random_parameters(CONFIG, seed=1)
  batch, m = make_batch(CONFIG), CONFIG.chunk_length

  def logits(batch):
    return run_model(CONFIG, params, batch, backward=False).logits

  own = logits(batch)
  for place in (3, 5, 8):
    changed = {x: y.copy() for x, y in batch.items()}
    changed["inputs"][:, place] += 1 - 2 * (batch["inputs"][:, place] == 43)
    # The chunk of the token finds other neighbours, and so may later ones.
    found = changed["neighbours"].reshape(2, -1, 4 * m)
    found[:, place // m :] = (found[:, place // m :] + 1) % 44
    moved = np.abs(logits(changed) - own).max(-1) > 0
    assert not moved[:, :place].any()
    assert moved[:, place].all()
    # Only what the changed neighbours change: from the end of the chunk on.
    changed["inputs"] = batch["inputs"]
    moved = np.abs(logits(changed) - own).max(-1) > 0
    end = place // m * m + m - 1
    assert not moved[:, :end].any()
    assert moved[:, end].all()
