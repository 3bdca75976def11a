# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Every row that follows from its paper has the published digits."""

import pytest

from palm_mtf.accounting.table3 import PALM_540B, table3
from palm_mtf.cli.gin_files import hardware_of
from tests.accounting.published_sizes import PALM_540B as PUBLISHED_540B

ROWS = {row["model"]: row for row in table3(hardware_of)}


# PaLM Table 3 and 4.1; Megatron-Turing's digits are truncated, not rounded.
@pytest.mark.parametrize(
  ("model", "published", "without_attention"),
  [
    ("Gopher", 0.325, None),
    ("Megatron-Turing NLG", 0.302, 0.297),
    ("PaLM", 0.462, 0.457),
  ],
)
def test_mfu_is_the_published_one(model, published, without_attention):
  row = ROWS[model]
  assert row["published_mfu"] == published
  assert 0 <= row["mfu"] - published < 0.001
  if without_attention:
    assert 0 <= row["mfu_without_attention"] - without_attention < 0.001


def test_hfu_of_palm_is_57_8_percent_with_the_papers_policy():
  assert round(ROWS["PaLM"]["hfu"], 3) == 0.578
  # Lower by the 10.5% of a forward pass that REMAT = "layer" does not repeat.
  ours = ROWS["PaLM"]["hfu_of_remat_layer"]
  assert ours == pytest.approx(0.578 - 0.105 * 0.457 / 3, abs=0.001)
  assert PALM_540B == PUBLISHED_540B


def test_gpt3_is_shown_as_what_its_paper_does_not_give():
  row = ROWS["GPT-3"]
  assert (row["published_mfu"], row["mfu"]) == (0.213, None)
  share = 24.6e12 / hardware_of("v100").chip_bfloat16_flops
  assert f"{share:.1%} of its peak" in row["note"]
