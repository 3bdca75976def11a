# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Each variable of a layer is in the array of its place in a period."""

import pytest

from palm_mtf.architecture.parameters import parameter_dims
from palm_mtf.executors.xla.layer_loops import (
  find_place,
  is_stacked,
  loops_of,
  stacked_names,
)
from tests.blocks import block_config


@pytest.mark.parametrize(
  ("layers", "num_layers", "loops"),
  [
    ("5*window, global", 12, [(range(6), 2)]),
    (
      "4*(5*window, global), 2*window",  # Gemma 3 1B
      26,
      [(range(6), 4), (range(24, 25), 2)],
    ),
    ("global, 3*window", 4, [(range(1), 1), (range(1, 2), 3)]),
    ("global", 4, [(range(1), 4)]),
  ],
)
def test_arrays_hold_every_variable_of_a_layer_once(layers, num_layers, loops):
  variants = {"window": {"ATTENTION_WINDOW": 3}, "global": {}}
  used = {x: y for x, y in variants.items() if x in layers}
  settings = {"num_layers": num_layers, "layers": layers, "variants": used}
  config = block_config("LLaMA", **settings)
  assert [(x.layers, x.count) for x in loops_of(config)] == loops
  names = [x for x in parameter_dims(config) if is_stacked(x)]
  arrays = {}
  for name in names:
    layer, part = int(name[6:9]), name[10:]
    _, first, period = find_place(loops_of(config), layer)
    arrays.setdefault(f"layer_{first:03d}/{part}", {})[period] = name
  for array, by_period in arrays.items():
    stacked = [by_period[i] for i in range(len(by_period))]
    assert stacked_names(loops_of(config), array) == stacked
  found = [x for y in arrays for x in stacked_names(loops_of(config), y)]
  assert sorted(found) == sorted(names)


def test_a_layers_array_has_every_sixth_layer_of_gemma_3():
  settings = {"num_layers": 24, "layers": "5*window, global"}
  variants = {"window": {"ATTENTION_WINDOW": 3}, "global": {}}
  config = block_config("LLaMA", variants=variants, **settings)
  assert stacked_names(loops_of(config), "layer_002/mlp/wi/momentum") == [
    f"layer_{i:03d}/mlp/wi/momentum" for i in (2, 8, 14, 20)
  ]
  assert stacked_names(loops_of(config), "embedding") == ["embedding"]
