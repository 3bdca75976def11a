# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of layouts; the peak of memory follows the layout."""

import json

import pytest

from tools.bench.cases import layouts

# 3.3M parameters, 40 MB of weights and slots, and next to no activations.
WIDE = [
  "--gin.NUM_LAYERS=1",
  "--gin.D_MODEL=512",
  "--gin.NUM_HEADS=8",
  "--gin.D_KV=16",
  "--gin.D_FF=1024",
  "--gin.VOCAB_SIZE=3000",
  "--gin.SEQUENCE_LENGTH=4",
  "--gin.GLOBAL_BATCH_SIZE=8",
  "--gin.ACTIVATION_DTYPE='float32'",
]


@pytest.mark.slow
def test_peak_memory_follows_what_devices_keep(run_bench):
  names = ("data parallel", "fully sharded")
  layouts = [f"--layout={name}" for name in names]
  flags = [*WIDE, *layouts, "--steps=1", "--json"]
  code, out, _ = run_bench("layouts", *flags)
  assert code == 0
  records = [json.loads(x) for x in out.splitlines()]
  whole, split = records
  assert [x["layout"] for x in records] == list(names)
  kept = [4 * (x["weight_bytes"] + x["slot_bytes"]) for x in records]
  assert kept[1] * 4 == kept[0]
  # Besides a weight and its two slots, a process holds at most, split in the
  # same way, the gradient, the sum of all devices' gradients, and the next
  # values of the three: 8 numbers instead of 3.
  saved = whole["peak_bytes"] - split["peak_bytes"]
  assert 0.8 * (kept[0] - kept[1]) < saved < 8 / 3 * (kept[0] - kept[1])
  assert list(split["moved_bytes"]) == [
    "all_gather data",
    "all_reduce data",
    "reduce_scatter data",
  ]


def test_a_row_adds_up_the_axes_of_a_kind():
  record = {
    "layout": "both",
    "moved_bytes": {
      "all_gather data": 2e6,
      "all_reduce data": 1e6,
      "all_reduce model": 3e6,
    },
    "weight_bytes": 10e6,
    "slot_bytes": 20e6,
    "gradient_bytes": 5e6,
    "peak_bytes": 2000e6,
    "step_secs": 0.25,
  }
  cells = layouts.row(record).split()
  assert cells == "both 4.0 0.0 2.0 30.0 5.0 2,000.0 0.250".split()
