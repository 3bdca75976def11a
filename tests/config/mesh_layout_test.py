# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Mesh shapes and layout rules: what they mean and what they refuse."""

import dataclasses

import pytest

from palm_mtf.config.mesh_layout import (
  DIMENSIONS,
  SPLIT_DIMENSIONS,
  WORK_DIMENSIONS,
  MeshLayout,
  check,
)
from palm_mtf.config.model import PalmConfig
from palm_mtf.errors import UserError

SPLITTABLE = "batch, heads, d_ff, vocab, d_model_stored, d_model_residual"

CONFIG = PalmConfig(
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
  check(mesh, CONFIG, 7)


def test_axis_size_of_is_the_number_of_slices():
  mesh = layout("data:2,model:4", "batch:data,d_ff:model")
  sizes = {name: mesh.axis_size_of(name) for name in DIMENSIONS}
  assert sizes == {**dict.fromkeys(DIMENSIONS, 1), "batch": 2, "d_ff": 4}


def test_every_split_that_divides_is_accepted():
  mesh = layout(
    "data:2,model:4", "batch:data,heads:model,d_ff:model,vocab:model"
  )
  check(mesh, CONFIG, 6)


def test_any_vocabulary_is_padded_to_what_its_axis_divides():
  mesh = layout("model:3", "vocab:model")
  check(mesh, CONFIG, 8)
  assert [mesh.padded_vocab_size(n) for n in (320, 321, 1)] == [321, 321, 3]
  assert layout("model:3", "heads:model").padded_vocab_size(320) == 320


def test_an_axis_of_one_may_split_nothing():
  assert layout("data:1,model:2", "heads:model").num_devices == 2


def test_batch_may_lie_on_either_axis():
  check(layout("model:3", "batch:model"), CONFIG, 6)


def test_dimensions_that_never_meet_may_share_an_axis():
  assert layout("data:2", "heads:data,d_ff:data,vocab:data").num_devices == 2


def test_four_dimensions_split_work_and_two_memory_alone():
  assert WORK_DIMENSIONS == ("batch", "heads", "d_ff", "vocab")
  assert SPLIT_DIMENSIONS == (
    *WORK_DIMENSIONS,
    "d_model_stored",
    "d_model_residual",
  )
  assert set(SPLIT_DIMENSIONS) < set(DIMENSIONS)


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
      "d_model:model",
      'layout rule "d_model:model": d_model cannot be split, because every '
      "norm sums over it. "
      f"Dimensions that can be: {SPLITTABLE}.",
    ),
    (
      "model:2",
      "length:model",
      'layout rule "length:model": length cannot be split, because attention '
      f"looks along it. Dimensions that can be: {SPLITTABLE}.",
    ),
    (
      "model:2",
      "memory_length:model",
      'layout rule "memory_length:model": memory_length cannot be split, '
      "because attention sums over it. "
      f"Dimensions that can be: {SPLITTABLE}.",
    ),
    (
      "model:2",
      "d_kv:model",
      'layout rule "d_kv:model": d_kv cannot be split, because rotary '
      "embedding turns pairs of it. "
      f"Dimensions that can be: {SPLITTABLE}.",
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
    (
      "data:2,model:8",
      "batch:data",
      'mesh axis "model"=8 splits no dimension: every core would repeat the '
      'same work. Add a rule such as "heads:model" to LAYOUT.',
    ),
    (
      "data:2",
      "",
      'mesh axis "data"=2 splits no dimension: every core would repeat the '
      'same work. Add a rule such as "batch:data" to LAYOUT.',
    ),
    (
      "data:2",
      "d_model_stored:data",
      'mesh axis "data"=2 splits only d_model_stored: every core would repeat '
      'the same work. Add a rule such as "batch:data" to LAYOUT.',
    ),
    (
      "data:2,model:2",
      "batch:data,d_model_stored:model,d_model_residual:model",
      'mesh axis "model"=2 splits only d_model_stored and d_model_residual: '
      "every core would repeat the same work. Add a rule such as "
      '"heads:model" to LAYOUT.',
    ),
    (
      "data:2,model:2",
      "batch:data,batch:model",
      'layout rule "batch:model": there is already a rule "batch:data"; keep '
      "one.",
    ),
    (
      "model:2",
      "heads:model,heads:model",
      'layout rule "heads:model": there is already a rule "heads:model"; keep '
      "one.",
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
      "data:0",
      "batch:data",
      'MESH_SHAPE "data:0": the size of an axis is a whole number of at least '
      "1.",
    ),
    (
      "data:-2",
      "batch:data",
      'MESH_SHAPE "data:-2": the size of an axis is a whole number of at '
      "least 1.",
    ),
    (
      "data:two",
      "batch:data",
      'MESH_SHAPE "data:two": the size of an axis is a whole number of at '
      "least 1.",
    ),
    (
      "data:2,data:4",
      "batch:data",
      'MESH_SHAPE "data:4": axis "data" is already there; give it one size.',
    ),
    (
      "data2",
      "",
      'MESH_SHAPE = "data2": "data2" is not a pair; write "data:2,model:4".',
    ),
    (
      "data:2:3",
      "",
      'MESH_SHAPE = "data:2:3": "data:2:3" is not a pair; write '
      '"data:2,model:4".',
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
  with pytest.raises(UserError) as error:
    layout(mesh_shape, rules)
  assert str(error.value) == message


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
  ],
)
def test_one_axis_splits_only_one_dimension_of_a_tensor(first, second, tensor):
  for rules in (f"{first}:data,{second}:data", f"{second}:data,{first}:data"):
    with pytest.raises(UserError) as error:
      layout("data:2", rules)
    assert str(error.value) == (
      f'layout rules "{first}:data" and "{second}:data": the tensor [{tensor}] '
      'can be split only once over axis "data"; move one to the other axis.'
    )


@pytest.mark.parametrize(
  ("mesh_shape", "rules", "batch", "message"),
  [
    (
      "model:8",
      "heads:model",
      8,
      "heads=12 is not divisible by mesh axis model=8 (rule heads:model). Use "
      "a divisor of 12, or another NUM_HEADS.",
    ),
    (
      "model:9",
      "d_ff:model",
      8,
      "d_ff=96 is not divisible by mesh axis model=9 (rule d_ff:model). Use a "
      "divisor of 96, or another D_FF.",
    ),
    (
      "data:5",
      "batch:data,d_model_stored:data",
      5,
      "d_model_stored=48 is not divisible by mesh axis data=5 (rule "
      "d_model_stored:data). Use a divisor of 48, or another D_MODEL.",
    ),
    (
      "model:5",
      "vocab:model,d_model_residual:model",
      8,
      "d_model_residual=48 is not divisible by mesh axis model=5 (rule "
      "d_model_residual:model). Use a divisor of 48, or another D_MODEL.",
    ),
    (
      "data:4",
      "batch:data",
      6,
      "batch=6 is not divisible by mesh axis data=4 (rule batch:data). Use a "
      "divisor of 6, or another GLOBAL_BATCH_SIZE.",
    ),
  ],
)
def test_a_size_that_does_not_divide_is_named(
  mesh_shape, rules, batch, message
):
  with pytest.raises(UserError) as error:
    check(layout(mesh_shape, rules), CONFIG, batch)
  assert str(error.value) == message


@pytest.mark.parametrize(
  ("num_microbatches", "batches", "message"),
  [
    (
      4,
      [16, 6],
      "a batch of 6 is not divisible by NUM_MICROBATCHES = 4. Use a divisor of "
      "6, or another GLOBAL_BATCH_SIZE.",
    ),
    (
      2,
      [16, 12],
      "batch=6 is not divisible by mesh axis data=4 (rule batch:data). Use a "
      "divisor of 6, or another GLOBAL_BATCH_SIZE / NUM_MICROBATCHES.",
    ),
  ],
)
def test_microbatches_that_do_not_divide_any_batch_are_named(
  num_microbatches, batches, message
):
  parts = dataclasses.replace(
    layout("data:4", "batch:data"), num_microbatches=num_microbatches
  )
  check(parts, CONFIG, batches[0])
  with pytest.raises(UserError) as error:
    check(parts, CONFIG, *batches)
  assert str(error.value) == message


@pytest.mark.parametrize(
  ("num_pods", "batches", "message"),
  [
    (
      4,
      [32, 6],
      "a batch of 6 is not divisible by NUM_PODS = 4. Use a divisor of 6, or "
      "another GLOBAL_BATCH_SIZE.",
    ),
    (
      2,
      [16, 12],
      "a pod's share of a batch, 12 / 2 = 6, is not divisible by "
      "NUM_MICROBATCHES = 4. Use a divisor of 6, or another GLOBAL_BATCH_SIZE.",
    ),
    (
      3,
      [24, 12],
      "batch=1 is not divisible by mesh axis data=2 (rule batch:data). Use a "
      "divisor of 1, or another GLOBAL_BATCH_SIZE / NUM_PODS / "
      "NUM_MICROBATCHES.",
    ),
  ],
)
def test_pods_that_do_not_divide_any_batch_are_named(
  num_pods, batches, message
):
  parts = dataclasses.replace(
    layout("data:2", "batch:data"), num_microbatches=4
  )
  check(parts, CONFIG, batches[0], num_pods=num_pods)
  with pytest.raises(UserError) as error:
    check(parts, CONFIG, *batches, num_pods=num_pods)
  assert str(error.value) == message


def test_no_microbatch_is_refused():
  with pytest.raises(UserError, match="NUM_MICROBATCHES = 0: give a whole"):
    MeshLayout(mesh_shape="", layout="", num_microbatches=0)
