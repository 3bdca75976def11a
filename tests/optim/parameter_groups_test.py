# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which parameters share a root mean square, and which decay."""

import pytest

from palm_mtf.optim.parameter_groups import is_decayed, scale_groups
from tests import oracle
from tests.mtf_testing import small_config

NAMES = list(oracle.parameter_shapes(small_config(block="serial")))


def test_each_variable_has_its_own_scale_unless_they_are_stacked():
  alone = [[i] for i in range(len(NAMES))]
  assert scale_groups(NAMES, "variable") == alone
  assert scale_groups(NAMES, "off") == alone


def test_stacked_matrices_are_those_of_the_published_inference_code():
  groups = scale_groups(NAMES, "stacked")
  assert [[NAMES[i] for i in group] for group in groups] == [
    ["embedding"],
    ["layer_000/norm/scale", "layer_001/norm/scale"],
    [
      f"layer_00{i}/{kernel}"
      for i in range(2)
      for kernel in ("attention/q", "mlp/wi_gate", "mlp/wi")
    ],
    [f"layer_00{i}/attention/{kernel}" for i in range(2) for kernel in "kv"],
    [
      f"layer_00{i}/{kernel}"
      for i in range(2)
      for kernel in ("attention/o", "mlp/wo")
    ],
    ["layer_000/mlp_norm/scale", "layer_001/mlp_norm/scale"],
    ["final_norm/scale"],
  ]


@pytest.mark.parametrize(
  ("weight_decay_on", "spared"),
  [
    ("all", []),
    ("all_but_scales", [n for n in NAMES if n.endswith("scale")]),
    ("kernels", [n for n in NAMES if n.endswith(("scale", "embedding"))]),
  ],
)
def test_what_does_not_decay(weight_decay_on, spared):
  assert spared == [n for n in NAMES if not is_decayed(n, weight_decay_on)]
