# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Prefix and prompt tuning have the logits and gradients of the papers."""

import pytest

from tests.blocks import Z_LOSS, check_slopes
from tests.cases import slow
from tests.mtf_testing import SINGLE, mesh_layout, relative_error, run_model
from tests.virtual_oracle import make_case

PARALLEL, SERIAL = (
  f"layer_norm {block} multi_query" for block in ("parallel", "serial")
)
BLOCKS = ("LLaMA 3", "GPT-2", "Gemma 3", "Gopher", "GPT-J", "BLOOM")
# (block, kind, settings, layout)
FAST = [
  (PARALLEL, "prefix", {}, SINGLE),
  (PARALLEL, "prompt", {}, mesh_layout("PaLM's 2D")),
  ("GPT-2", "prompt", {}, SINGLE),
]
SLOW = [
  (block, kind, {"remat": remat}, mesh_layout(layout))
  for block in (*BLOCKS, "Yarn LLaMA 2", "T5", "Mistral", "Mixtral")
  for kind, remat, layout in (
    ("prefix", "none", "PaLM's 2D"),
    ("prompt", "layer", "two axes but no batch"),
  )
]
SLOW += [
  (SERIAL, "prefix", {}, mesh_layout("all over data and model")),
  ("LLaMA 3", "prefix", {"remat": "layer"}, mesh_layout("PaLM's 2D")),
]


@pytest.mark.parametrize(
  ("block", "kind", "settings", "mesh"), [*FAST, *(slow(*x) for x in SLOW)]
)
def test_logits_and_gradients_are_the_papers(block, kind, settings, mesh):
  """A packed document has the numbers that it has by itself."""
  case = make_case(block, kind, **settings)
  given = case.config, case.params, case.batch
  result = run_model(*given, mesh=mesh, z_loss=Z_LOSS)
  read = case.batch["loss_weights"] > 0
  assert relative_error(result.logits[read], case.logits[read]) < 1e-5
  assert (result.loss, result.z_loss) == pytest.approx(case.losses, rel=1e-5)
  assert result.gradients.keys() == case.slopes.keys()
  check_slopes(case, result)
