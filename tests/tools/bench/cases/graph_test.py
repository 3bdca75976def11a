# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of graphs; building a program allocates no weights."""

import json

import pytest

from palm_mtf.config import MeshLayout
from tools.bench.cases import graph

# Its weights and slots would take 2.1 GB.
WIDE = [
  "--gin.D_MODEL=8192",
  "--gin.NUM_HEADS=16",
  "--gin.D_FF=8192",
  "--gin.VOCAB_SIZE=1000",
  "--gin.GLOBAL_BATCH_SIZE=8",
]


@pytest.mark.slow
def test_building_allocates_no_weights(run_bench):
  flags = ["--mesh=data:2", "--layers=1", "--json"]
  code, out, _ = run_bench("graph", *WIDE, *flags)
  assert code == 0
  (record,) = map(json.loads, out.splitlines())
  assert record["mesh"] == "data:2"
  assert (record["devices"], record["layers"]) == (2, 1)
  assert record["operations"] > 1000
  assert record["build_secs"] > 0
  assert record["peak_bytes"] - record["before_bytes"] < 5e8


def test_the_rules_are_those_of_palms_layout():
  rules = graph.train_config(
    [graph.RECIPE, "layouts/palm_2d.gin"],
    ["TEXT_FILES='none'"],
  ).mesh_layout
  own = MeshLayout(
    mesh_shape="data:2,model:2", layout=",".join(graph.RULES.values())
  )
  assert own.rules == rules.rules


def test_a_row_has_gib_and_grouped_digits():
  record = {
    "mesh": "data:4,model:2",
    "layers": 118,
    "devices": 8,
    "build_secs": 61.26,
    "peak_bytes": 3 << 30,
    "before_bytes": 1 << 29,
    "operations": 1234567,
  }
  cells = graph.row(record).split()
  assert cells == "data:4,model:2 8 118 61.3 3.00 0.50 1,234,567".split()
