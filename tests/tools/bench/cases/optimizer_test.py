# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The optimizer's share of a step is measured in pairs."""

import json

import pytest

from tools.bench.cases import optimizer

SMALL = [
  "--gin.NUM_LAYERS=1",
  "--gin.D_MODEL=32",
  "--gin.NUM_HEADS=2",
  "--gin.D_KV=16",
  "--gin.D_FF=64",
  "--gin.VOCAB_SIZE=64",
  "--gin.SEQUENCE_LENGTH=16",
  "--gin.GLOBAL_BATCH_SIZE=2",
]


def test_the_share_is_the_median_of_the_pairs():
  record = optimizer.summarize([(2, 1), (2, 1.5), (4, 3.6)])
  assert record["optimizer_share"] == 0.25
  assert record["step_secs"] == 2


@pytest.mark.slow
def test_a_small_recipe_is_measured(run_bench):
  flags = [*SMALL, "--rounds=3", "--json", "--gin.SECOND_MOMENT='factored'"]
  code, out, _ = run_bench("optimizer", *flags)
  assert code == 0
  record = json.loads(out)
  assert record["rounds"] == 3
  for by in ("clock", "cpu"):
    assert record[by]["optimizer_share"] < 1
    assert record[by]["step_secs"] > 0
