# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Names say layer, part and kind of every parameter of a model."""

import pytest

from palm_mtf.accounting.params import parameter_shapes
from palm_mtf.config.parameter_names import layer_name, parsed
from tests.mtf_testing import small_config


@pytest.mark.parametrize(
  ("name", "layer", "part", "kind"),
  [
    ("embedding", None, "embedding", "embedding"),
    ("layer_007/attention/q", 7, "attention/q", "attention"),
    ("layer_000/mlp/wi_gate", 0, "mlp/wi_gate", "mlp"),
    ("layer_117/norm/scale", 117, "norm/scale", "norm"),
    ("layer_001/mlp_norm/scale", 1, "mlp_norm/scale", "norm"),
    ("final_norm/scale", None, "final_norm/scale", "norm"),
  ],
)
def test_a_name_says_layer_part_and_kind(name, layer, part, kind):
  found = parsed(name)
  assert (found.layer, found.part, found.kind) == (layer, part, kind)
  assert found.is_scale == (kind == "norm")
  assert found.is_kernel == (kind in ("attention", "mlp"))
  assert found.last == name.split("/")[-1]


@pytest.mark.parametrize("block", ["parallel", "serial"])
def test_every_name_of_a_model_is_made_of_its_layer_and_part(block):
  for name, shape in parameter_shapes(small_config(block=block)).items():
    found = parsed(name)
    if found.layer is not None:
      assert name == f"{layer_name(found.layer)}/{found.part}"
    assert found.is_scale == (len(shape) == 1)
