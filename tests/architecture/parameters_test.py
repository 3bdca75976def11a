# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts of parameters are the published ones; names follow the schema."""

import dataclasses
import typing

import pytest

from palm_mtf.architecture.parameters import (
  Parameter,
  Role,
  check_frozen,
  count_parameters,
  distinct_parameters,
  first_in_backward,
  frozen_in_stage,
  frozen_names,
  layer_name,
  parameter_shapes,
  parameters_of,
  parse_name,
  user_name,
)
from tests.accounting.published_sizes import (
  PALM_8B,
  PALM_62B,
  PALM_540B,
  count_norm_scales,
)
from tests.blocks import SETTINGS, block_config
from tests.mtf_testing import small_config
from tests.refusals import message_of

TINY = dataclasses.replace(
  PALM_8B, num_layers=1, d_model=8, num_heads=3, d_kv=4, d_ff=16, vocab_size=10
)


@pytest.mark.parametrize(
  ("config", "parameters", "norm_scales"),
  [
    (PALM_8B, 8_631_877_632, 135_168),
    (PALM_62B, 62_495_129_600, 532_480),
    (PALM_540B, 540_354_281_472, 2_193_408),
  ],
  ids=["8B", "62B", "540B"],
)
def test_counts_are_exactly_those_of_the_paper(config, parameters, norm_scales):
  assert count_parameters(config) == parameters
  assert count_norm_scales(config) == norm_scales


@pytest.mark.parametrize("attention", ["multi_query", "multi_head"])
@pytest.mark.parametrize("block", ["parallel", "serial"])
def test_counts_follow_the_closed_form(block, attention):
  c = dataclasses.replace(PALM_8B, block=block, attention=attention)
  kv = c.d_kv * (c.num_heads if attention == "multi_head" else 1)
  layer = c.d_model * (2 * c.num_heads * c.d_kv + 2 * kv + 3 * c.d_ff)
  assert count_parameters(c) == c.vocab_size * c.d_model + c.num_layers * layer
  norms = c.num_layers * (2 if block == "serial" else 1) + 1
  assert count_norm_scales(c) == norms * c.d_model


@pytest.mark.parametrize("name", ["LLaMA", "Gemma 3", "Cohere 2"])
def test_one_of_like_layers_stands_for_all(name):
  config = small_config(**SETTINGS[name])
  found = [x.shape for x in distinct_parameters(config) for _ in range(x.count)]
  assert sorted(found) == sorted(parameter_shapes(config).values())


def test_names_and_shapes_follow_the_schema_in_order_of_creation():
  assert list(parameter_shapes(TINY).items()) == [
    ("embedding", (10, 8)),
    ("layer_000/norm/scale", (8,)),
    ("layer_000/attention/q", (8, 3, 4)),
    ("layer_000/attention/k", (8, 4)),
    ("layer_000/attention/v", (8, 4)),
    ("layer_000/attention/o", (3, 4, 8)),
    ("layer_000/mlp/wi_gate", (8, 16)),
    ("layer_000/mlp/wi", (8, 16)),
    ("layer_000/mlp/wo", (16, 8)),
    ("final_norm/scale", (8,)),
  ]


@pytest.mark.parametrize(
  ("name", "layer", "part", "kind"),
  [
    ("embedding", None, "embedding", "embedding"),
    ("layer_007/attention/q", 7, "attention/q", "attention"),
    ("layer_000/mlp/wi_gate", 0, "mlp/wi_gate", "mlp"),
    ("layer_117/norm/scale", 117, "norm/scale", "norm"),
    ("layer_001/mlp_norm/scale", 1, "mlp_norm/scale", "norm"),
    (
      *("layer_002/attention_output_norm/scale", 2),
      *("attention_output_norm/scale", "norm"),
    ),
    ("final_norm/scale", None, "final_norm/scale", "norm"),
  ],
)
def test_a_name_says_layer_part_and_kind(name, layer, part, kind):
  found = parse_name(name)
  assert (found.layer, found.part, found.kind) == (layer, part, kind)
  assert found.is_scale == (kind == "norm")
  assert found.is_kernel == (kind in ("attention", "mlp"))
  assert found.last == name.split("/")[-1]


@pytest.mark.parametrize("block", ["parallel", "serial"])
def test_every_name_of_a_model_is_made_of_its_layer_and_part(block):
  for name, shape in parameter_shapes(small_config(block=block)).items():
    found = parse_name(name)
    if found.layer is not None:
      assert name == f"{layer_name(found.layer)}/{found.part}"
    assert found.is_scale == (len(shape) == 1)


DEEP = dataclasses.replace(TINY, num_layers=12)


@pytest.mark.parametrize(
  ("patterns", "names"),
  [
    (["embedding"], ["embedding"]),
    (["layers/*/norm*"], [f"layer_{i:03d}/norm/scale" for i in range(12)]),
    (
      ["layers/1/attention/[qk]"],
      ["layer_001/attention/q", "layer_001/attention/k"],
    ),
    (["layers/1[01]/mlp/wo"], ["layer_010/mlp/wo", "layer_011/mlp/wo"]),
    (["*norm/scale", "layers/?/*", "layers/1?/[!n]*"], None),
    ([], []),
  ],
)
def test_patterns_match_layers_by_their_plain_numbers(patterns, names):
  """`names` None: all but the embedding."""
  if names is None:
    names = [x for x in parameter_shapes(DEEP) if x != "embedding"]
  found = parameters_of(DEEP, tuple(patterns))
  assert [x.name for x in found] == list(parameter_shapes(DEEP))
  assert [x.name for x in found if x.role == "frozen"] == names
  assert [x.name for x in found if not x.is_trained] == names


def test_a_step_updates_trained_parameters_adapters_and_states():
  roles = typing.get_args(Role)
  assert [x for x in roles if Parameter("a", (), x).is_trained] == [
    "trained",
    "adapter",
    "state",
  ]


ENDS = (
  '; give names of parameters, such as "embedding" or "layers/7/attention/q", '
  'with "*" for any characters.'
)


@pytest.mark.parametrize(
  ("patterns", "message"),
  [
    (["embeding"], f'"embeding" (did you mean "embedding"?){ENDS}'),
    (
      ["embedding", "layers/*/nrom*"],
      f'"layers/*/nrom*" (did you mean "layers/*/norm/*"?){ENDS}',
    ),
    (
      ["layer_007/attention/q"],
      '"layer_007/attention/q" (did you mean "layers/7/attention/q"?)' + ENDS,
    ),
    (["layers/7"], f'"layers/7" (did you mean "layers/7/*"?){ENDS}'),
    (["qqq"], f'"qqq"{ENDS}'),
  ],
)
def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest(
  patterns, message
):
  assert message_of(check_frozen, parameter_shapes(DEEP), patterns) == (
    f"FROZEN = {patterns!r}: no parameter matches {message}"
  )


@pytest.mark.parametrize("patterns", [["*"], ["layers/*", "[!l]*"]])
def test_freezing_all_parameters_is_refused(patterns):
  assert message_of(check_frozen, parameter_shapes(DEEP), patterns) == (
    f"FROZEN = {patterns!r}: freezes all parameters, so nothing is left to "
    "train; take patterns out."
  )


def test_loads_of_routers_are_neither_frozen_nor_trained():
  shapes = parameter_shapes(block_config("DeepSeek-V3"))
  loads = {x for x in shapes if x.endswith("router_load")}
  states = loads | {x for x in shapes if x.endswith("router_bias")}
  assert frozen_names(shapes, ["layers/*/mlp/*"]).isdisjoint(loads)
  trained = [user_name(x) for x in shapes if x not in states]
  assert "freezes all parameters" in message_of(check_frozen, shapes, trained)
  assert "no parameter matches" in message_of(
    check_frozen, shapes, ["*router_load"]
  )


@pytest.mark.parametrize(
  ("frozen", "first"),
  [
    ((), 0),
    (("layers/*",), 0),  # the embedding is trained
    (("embedding",), 0),
    (("embedding", "layers/0/*"), 1),
    (("embedding", "layers/[0-3]/*", "layers/9/*"), 4),
    (("embedding", "layers/*/mlp/*", "layers/?/*"), 10),
    (("embedding", "layers/*"), 12),
  ],
)
def test_the_backward_pass_ends_at_the_lowest_trained_layer(frozen, first):
  assert first_in_backward(DEEP, frozen) == first


@pytest.mark.parametrize(
  ("frozen", "stage", "expected"),
  [
    (("layers/4/mlp/wo",), 0, ()),
    (("layers/4/mlp/wo",), 1, ("layers/0/mlp/wo",)),
    # What comes before stage 1 is trained, so its backward pass is whole.
    (("embedding", "layers/5/mlp/wo"), 1, ("layers/1/mlp/wo",)),
    (("embedding", "layers/5/mlp/wo"), 0, ("embedding",)),
  ],
)
def test_a_stage_freezes_its_own_layers(frozen, stage, expected):
  assert frozen_in_stage(DEEP, frozen, stage, 3) == expected
