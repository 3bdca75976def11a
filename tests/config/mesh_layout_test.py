# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Mesh shapes and layout rules: what they mean and what they refuse."""

import dataclasses

import pytest

from palm_mtf.config import ModelConfig
from palm_mtf.config.mesh_layout import DIMENSIONS, MeshLayout, check_layout
from tests.refusals import message_of

SPLITTABLE = (
  "batch, heads, d_ff, experts, vocab, d_model_stored, d_model_residual"
)

CONFIG = ModelConfig(
  num_layers=2,
  d_model=48,
  num_heads=12,
  d_kv=4,
  d_ff=96,
  vocab_size=320,
  sequence_length=8,
)


def layout(mesh_shape: str, rules: str) -> MeshLayout:
  return MeshLayout(mesh_shape=mesh_shape, layout=rules)


def refusal(mesh_shape, rules) -> str:
  return message_of(layout, mesh_shape, rules)


def refused_by_check(mesh: MeshLayout, *batches: int, num_pods: int = 1) -> str:
  return message_of(check_layout, mesh, CONFIG, *batches, num_pods=num_pods)


def test_axes_and_rules_keep_their_order():
  mesh = layout("model:4,data:2", "vocab:model,batch:data,heads:model")
  assert list(mesh.axes.items()) == [("model", 4), ("data", 2)]
  assert list(mesh.rules.items()) == [
    ("vocab", "model"),
    ("batch", "data"),
    ("heads", "model"),
  ]
  assert mesh.num_devices == 8


@pytest.mark.parametrize(
  ("mesh_shape", "rules"),
  [
    ("data:2,model:4", "batch:data,heads:model"),
    ("data:2;model:4", "batch:data;heads:model"),
    (" data:2, model:4 ", "batch:data; heads:model;"),
  ],
)
def test_comma_and_semicolon_separate_alike(mesh_shape, rules):
  mesh = layout(mesh_shape, rules)
  assert mesh.axes == {"data": 2, "model": 4}
  assert mesh.rules == {"batch": "data", "heads": "model"}


def test_empty_texts_are_one_device_that_splits_nothing():
  mesh = layout("", "")
  assert (mesh.axes, mesh.rules, mesh.num_devices) == ({}, {}, 1)
  assert {mesh.axis_size_of(dimension) for dimension in DIMENSIONS} == {1}
  check_layout(mesh, CONFIG, 7)


@pytest.mark.parametrize(
  ("mesh_shape", "rules"),
  [
    # Every split that divides.
    ("data:2,model:4", "batch:data,heads:model,d_ff:model,vocab:model"),
    ("data:1,model:2", "heads:model"),  # an axis of one that splits nothing
    ("model:3", "batch:model"),  # a batch on the other axis
    # Dimensions that never meet on one axis.
    ("data:2", "heads:data,d_ff:data,vocab:data"),
  ],
)
def test_a_layout_that_can_be_computed_is_accepted(mesh_shape, rules):
  check_layout(layout(mesh_shape, rules), CONFIG, 6)


def test_any_vocabulary_is_padded_to_what_its_axis_divides():
  mesh = layout("model:3", "vocab:model")
  check_layout(mesh, CONFIG, 8)
  assert [mesh.padded_vocab_size(n) for n in (320, 321, 1)] == [321, 321, 3]
  assert layout("model:3", "heads:model").padded_vocab_size(320) == 320


@pytest.mark.parametrize(
  ("dimension", "why"),
  [
    ("d_model", "every norm sums over it"),
    ("length", "attention looks along it"),
    ("memory_length", "attention sums over it"),
    ("d_kv", "rotary embedding turns pairs of it"),
  ],
)
def test_a_dimension_that_cannot_be_split_is_named_with_the_reason(
  dimension, why
):
  assert refusal("model:2", f"{dimension}:model") == (
    f'layout rule "{dimension}:model": {dimension} cannot be split, because '
    f"{why}. Dimensions that can be: {SPLITTABLE}."
  )


@pytest.mark.parametrize(
  ("mesh_shape", "rules", "what", "add"),
  [
    ("data:2,model:8", "batch:data", '"model"=8 splits no dimension', "heads"),
    ("data:2", "", '"data"=2 splits no dimension', "batch"),
    (
      "data:2",
      "d_model_stored:data",
      '"data"=2 splits only d_model_stored',
      "batch",
    ),
    (
      "data:2,model:2",
      "batch:data,d_model_stored:model,d_model_residual:model",
      '"model"=2 splits only d_model_stored and d_model_residual',
      "heads",
    ),
  ],
)
def test_an_axis_that_splits_no_work_is_named(mesh_shape, rules, what, add):
  axis = what.split('"')[1]
  assert refusal(mesh_shape, rules) == (
    f"mesh axis {what}: every core would repeat the same work. Add a rule such "
    f'as "{add}:{axis}" to LAYOUT.'
  )


@pytest.mark.parametrize("size", ["0", "-2", "two"])
def test_the_size_of_an_axis_is_a_whole_number(size):
  assert refusal(f"data:{size}", "batch:data") == (
    f'MESH_SHAPE "data:{size}": the size of an axis is a whole number of at '
    "least 1."
  )


@pytest.mark.parametrize(
  ("mesh_shape", "rules", "message"),
  [
    (
      "model:2",
      "dff:model",
      'layout rule "dff:model": no dimension "dff" (did you mean "d_ff"?). '
      f"Dimensions: {SPLITTABLE}.",
    ),
    (
      "model:2",
      "xyz:model",
      f'layout rule "xyz:model": no dimension "xyz". Dimensions: {SPLITTABLE}.',
    ),
    (
      "model:2",
      "heads:modle",
      'layout rule "heads:modle": no axis "modle" (did you mean "model"?). '
      "Axes: data, model.",
    ),
    (
      "data:2",
      "batch:data,heads:model",
      'layout rule "heads:model": MESH_SHAPE = "data:2" has no axis "model"; '
      'add "model:<size>" to it or drop the rule.',
    ),
    *(
      (
        "data:2,model:2",
        f"batch:data,{again}",
        f'layout rule "{again}": there is already a rule "batch:data"; keep '
        "one.",
      )
      for again in ("batch:model", "batch:data")
    ),
    (
      "batch:2",
      "",
      'MESH_SHAPE "batch:2": no axis "batch". Axes: data, model.',
    ),
    (
      "dta:2",
      "",
      'MESH_SHAPE "dta:2": no axis "dta" (did you mean "data"?). '
      "Axes: data, model.",
    ),
    (
      "data:2,data:4",
      "batch:data",
      'MESH_SHAPE "data:4": axis "data" already has a size; give it one size.',
    ),
    *(
      (
        text,
        "",
        f'MESH_SHAPE = "{text}": "{text}" is not a pair; write '
        '"data:2,model:4".',
      )
      for text in ("data2", "data:2:3")
    ),
    (
      "data:2",
      "batch:",
      'LAYOUT = "batch:": "batch:" is not a pair; write '
      '"batch:data,heads:model".',
    ),
    (8, "", 'MESH_SHAPE = 8: give a text such as "data:2,model:4".'),
    ("", None, 'LAYOUT = None: give a text such as "batch:data,heads:model".'),
  ],
)
def test_a_wrong_layout_is_named_with_the_rule_and_the_fix(
  mesh_shape, rules, message
):
  assert refusal(mesh_shape, rules) == message


@pytest.mark.parametrize(
  ("first", "second", "tensor"),
  [
    ("batch", "vocab", "batch, length, vocab"),
    ("batch", "heads", "batch, length, heads"),
    ("batch", "d_ff", "batch, length, d_ff"),
    ("batch", "d_model_residual", "batch, length, d_model_residual"),
    ("vocab", "d_model_stored", "vocab, d_model_stored"),
    ("d_model_stored", "heads", "d_model_stored, heads, d_kv"),
    ("d_model_stored", "d_ff", "d_model_stored, d_ff"),
    ("experts", "d_ff", "experts, d_model, d_ff"),
  ],
)
def test_one_axis_splits_only_one_dimension_of_a_tensor(first, second, tensor):
  for rules in (f"{first}:data,{second}:data", f"{second}:data,{first}:data"):
    assert refusal("data:2", rules) == (
      f'layout rules "{first}:data" and "{second}:data": the tensor [{tensor}] '
      'can be split only once over axis "data"; move one rule to the other '
      "axis."
    )


@pytest.mark.parametrize(
  ("mesh_shape", "rules", "size", "such", "setting"),
  [
    ("model:8", "heads:model", 12, ", such as model=4", "NUM_HEADS"),
    ("model:9", "d_ff:model", 96, ", such as model=3", "D_FF"),
    ("data:5", "d_model_stored:data,batch:data", 48, "", "D_MODEL"),
    ("model:5", "d_model_residual:model,vocab:model", 48, "", "D_MODEL"),
    ("data:4", "batch:data", 10, ", such as data=2", "GLOBAL_BATCH_SIZE"),
  ],
)
def test_a_size_that_does_not_divide_is_named_with_ways_out(
  mesh_shape, rules, size, such, setting
):
  rule = rules.partition(",")[0]
  dimension = rule.partition(":")[0]
  ways = f"another {setting}, or a LAYOUT without {rule}"
  if dimension == "batch":
    ways = f"or another {setting}"
  assert refused_by_check(layout(mesh_shape, rules), 10) == (
    f"{dimension}={size} is not divisible by mesh axis "
    f"{mesh_shape.replace(':', '=')} (rule {rule}). Use a divisor of "
    f"{size}{such}, {ways}."
  )


@pytest.mark.parametrize(
  ("axis_size", "num_microbatches", "num_pods", "batches", "message"),
  [
    (
      *(4, 4, 1, [16, 6]),
      "a batch of 6 is not divisible by NUM_MICROBATCHES = 4. Use a divisor of "
      "6, or another GLOBAL_BATCH_SIZE.",
    ),
    (
      *(4, 2, 1, [16, 12]),
      "batch=6 is not divisible by mesh axis data=4 (rule batch:data). Use a "
      "divisor of 6, such as data=2, or another GLOBAL_BATCH_SIZE / "
      "NUM_MICROBATCHES.",
    ),
    (
      *(2, 4, 4, [32, 6]),
      "a batch of 6 is not divisible by NUM_PODS = 4. Use a divisor of 6, or "
      "another GLOBAL_BATCH_SIZE.",
    ),
    (
      *(2, 4, 2, [16, 12]),
      "a pod's share of a batch, 12 / 2 = 6, is not divisible by "
      "NUM_MICROBATCHES = 4. Use a divisor of 6, or another GLOBAL_BATCH_SIZE.",
    ),
    (
      *(2, 4, 3, [24, 12]),
      "batch=1 is not divisible by mesh axis data=2 (rule batch:data). Use a "
      "divisor of 1, or another GLOBAL_BATCH_SIZE / NUM_PODS / "
      "NUM_MICROBATCHES.",
    ),
  ],
)
def test_microbatches_and_pods_that_do_not_divide_any_batch_are_named(
  axis_size, num_microbatches, num_pods, batches, message
):
  parts = dataclasses.replace(
    layout(f"data:{axis_size}", "batch:data"), num_microbatches=num_microbatches
  )
  check_layout(parts, CONFIG, batches[0], num_pods=num_pods)
  assert refused_by_check(parts, *batches, num_pods=num_pods) == message


def test_heads_that_share_a_norm_are_not_split():
  config = dataclasses.replace(CONFIG, qk_norm="rms_norm_all_heads")
  check_layout(layout("data:2,model:1", "batch:data,heads:model"), config, 8)
  mesh = layout("model:2", "heads:model")
  assert message_of(check_layout, mesh, config, 8) == (
    "layout rule \"heads:model\" and QK_NORM = 'rms_norm_all_heads': all heads "
    "share the norm; leave the rule out of LAYOUT."
  )


def test_no_microbatch_is_refused():
  said = message_of(MeshLayout, mesh_shape="", layout="", num_microbatches=0)
  assert said.startswith("NUM_MICROBATCHES = 0: give a whole")


def test_stages_that_do_not_divide_the_layers_are_refused():
  """And loops of steps, of which stages have none."""
  mesh = MeshLayout(mesh_shape="", layout="", stages=2)
  assert mesh.pod_devices == 2
  three = dataclasses.replace(CONFIG, num_layers=3)
  assert message_of(check_layout, mesh, three, 8) == (
    "NUM_LAYERS = 3 is not divisible by STAGES = 2; use a divisor of 3."
  )
  split = {"mesh_shape": "data:4", "layout": "batch:data", "stages": 2}
  assert message_of(MeshLayout, **split, tpu="v4-8", steps_per_loop=4) == (
    "STAGES = 2 and STEPS_PER_LOOP = 4: stages send each other activations in "
    "each step; set STEPS_PER_LOOP = 1."
  )
  said = message_of(MeshLayout, mesh_shape="", layout="", stage_order="1b1f")
  assert said.startswith("STAGE_ORDER = '1b1f'")
