# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapted models have the logits and gradients of the papers' formulas."""

import dataclasses
import re

import pytest

from palm_mtf.architecture.adapter import adapter_scale
from palm_mtf.architecture.targets import check_targets
from palm_mtf.errors import UserError
from tests.adapter_oracle import make_case
from tests.blocks import Z_LOSS, block_config, check_slopes
from tests.cases import slow
from tests.mtf_testing import (
  SINGLE,
  mesh_layout,
  random_documents,
  random_tokens,
  relative_error,
  run_model,
)

EVERY = ("q", "k", "v", "o", "wi_gate", "wi", "wo")
DORA = {"adapter": "dora"}
PARALLEL, SERIAL = (
  f"layer_norm {block} multi_query" for block in ("parallel", "serial")
)
SQRT = {"adapter_scale": "sqrt_rank"}
# (block, last words of adapted kernels, settings, layout)
FAST = [
  (PARALLEL, EVERY, {}, SINGLE),
  (PARALLEL, ("k", "wi", "wo"), SQRT, mesh_layout("PaLM's 2D")),
  ("GPT-NeoX", EVERY, DORA, SINGLE),
  ("LLaMA 3", EVERY, {"remat": "layer"}, SINGLE),
  (SERIAL, EVERY, DORA, mesh_layout("all over data and model")),
]
SLOW = [
  (block, targets, {**adapter, "remat": remat}, mesh_layout(layout))
  for block in (PARALLEL, SERIAL, "LLaMA 3", "GPT-2", "Gemma 3", "Gopher")
  for targets in (EVERY, ("q", "v"), ("o", "wi"))
  for adapter, remat in (({}, "none"), (DORA, "layer"))
  for layout in ("PaLM's 2D", "two axes but no batch")
]


def check(case, result):
  """Compares logits, losses, and gradients along random directions."""
  assert relative_error(result.logits, case.logits) < 1e-5
  assert (result.loss, result.z_loss) == pytest.approx(case.losses, rel=1e-5)
  assert result.gradients.keys() == case.slopes.keys()
  check_slopes(case, result)


@pytest.mark.parametrize(
  ("block", "targets", "settings", "mesh"), [*FAST, *(slow(*x) for x in SLOW)]
)
def test_logits_and_gradients_are_the_papers(block, targets, settings, mesh):
  """Only the adapter gets gradients."""
  rows = random_tokens if mesh == SINGLE else random_documents
  case = make_case(block, targets, rows, **settings)
  given = case.config, case.params, case.batch
  result = run_model(*given, mesh=mesh, z_loss=Z_LOSS)
  check(case, result)


@pytest.mark.parametrize("block", [PARALLEL, "GPT-2"])
def test_a_zero_adapter_changes_no_bit(block):
  """As LoRA begins: B is 0."""
  case = make_case(block, EVERY)
  params = {
    x: 0 * y if x.endswith("_lora_b") else y for x, y in case.params.items()
  }
  base = {x: y for x, y in params.items() if "_lora_" not in x}
  logits = [
    run_model(config, given, case.batch, backward=False).logits
    for config, given in ((case.config, params), (case.config.base, base))
  ]
  assert logits[0].tobytes() == logits[1].tobytes()
  assert relative_error(logits[0], case.logits) > 0.1


@pytest.mark.parametrize(
  ("targets", "said"),
  [
    (["*"], '"*" matches mlp/router, and a token uses only some experts'),
    (["attention/*", "mlp/experts/wi"], "matches mlp/experts/wi, and"),
    (["attention/qq"], 'no kernel of a layer matches "attention/qq" (did you'),
  ],
)
def test_targets_that_are_experts_or_nothing_are_refused(targets, said):
  adapter = {"adapter": "lora", "adapter_rank": 2, "adapter_alpha": 1.0}
  config = block_config("Mixtral", **adapter, adapter_targets=targets)
  with pytest.raises(UserError, match=re.escape(said)):
    check_targets(config)
  check_targets(dataclasses.replace(config, adapter_targets=["attention/?"]))


def test_models_with_experts_have_adapters_of_other_kernels():
  case = make_case("DeepSeek-V3", ("q", "k", "v", "o"))
  result = run_model(case.config, case.params, case.batch, z_loss=Z_LOSS)
  check(case, result)


@pytest.mark.parametrize(
  ("rule", "alpha", "rank", "scale"),
  [
    ("rank", 16.0, 8, 2.0),  # PEFT: lora_alpha / r
    ("rank", 8, 8, 1.0),
    ("rank", 1.0, 64, 1 / 64),
    ("sqrt_rank", 16.0, 64, 2.0),  # PEFT with use_rslora: lora_alpha / sqrt(r)
    ("sqrt_rank", 8.0, 1, 8.0),
  ],
)
def test_the_scale_is_alpha_by_the_rank_or_its_root(rule, alpha, rank, scale):
  assert adapter_scale(rule, alpha, rank) == pytest.approx(scale, rel=1e-15)
