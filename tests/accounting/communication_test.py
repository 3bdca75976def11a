# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes between pods and the steps they make, worked out by hand.

pod_test.py compares the bytes with those of the graph.
"""

import collections
import dataclasses
import itertools
import math

import pytest

from palm_mtf._tf import tf
from palm_mtf.accounting.communication import (
  Link,
  axes_bandwidth,
  dcn_bytes,
  step_bytes,
  step_secs,
  sync_secs,
)
from palm_mtf.accounting.memory import outer_bytes
from palm_mtf.architecture.parameters import count_parameters
from palm_mtf.config import ExchangeConfig, MeshLayout, PodsConfig
from palm_mtf.programs.train_program import build_train_program
from tests.accounting.published_sizes import (
  PALM_8B,
  PALM_540B,
  count_norm_scales,
)
from tests.blocks import CAPACITY, SETTINGS
from tests.mtf_testing import LAYOUTS, MOVED, PALM_OPTIMIZER, small_config
from tests.settings import ADAMW, MUON, hardware_of, step_config, work
from tools.traffic import traffic

SINGLE = MeshLayout(mesh_shape="", layout="")
TWO_PODS = PodsConfig(num_pods=2, dcn_dtype="bfloat16")
NUMBERS = count_parameters(PALM_8B) + count_norm_scales(PALM_8B)


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
@pytest.mark.parametrize(
  ("num_pods", "pairs"), [(1, 0), (2, 2), (3, 6), (4, 12)]
)
def test_every_pod_sends_every_gradient_to_every_other(
  num_pods, pairs, dtype, size
):
  pods = PodsConfig(num_pods=num_pods, dcn_dtype=dtype)
  expected = pairs * (NUMBERS * size + 3 * 4)
  assert dcn_bytes(work(PALM_8B, pods=pods)) == expected


@pytest.mark.parametrize(
  ("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("int8", 1 + 4 / 256)]
)
def test_in_a_round_every_pod_sends_every_parameter_once_to_every_other(
  dtype, size
):
  """Of 3 pods; its time by hand, of which 2 of 50 steps hide a part."""
  steps = {"outer_steps": 200, "fragments": 4, "overlap_steps": 2}
  exchange = ExchangeConfig(exchange="diloco", outer_dtype=dtype, **steps)
  given = work(PALM_8B, pods=PodsConfig(num_pods=3))
  given = dataclasses.replace(given, exchange=exchange)
  assert dcn_bytes(given) == pytest.approx(6 * NUMBERS * size / 200, rel=1e-6)
  secs = 8 * 2 * NUMBERS * size / 4 / 1e9 + 3 * 0.1
  link = Link(bits_per_sec=1e9, delay_secs=0.1)
  exposed, hidden = sync_secs(given, 5.0, link)
  assert exposed == pytest.approx((secs - 10) / 50, rel=1e-6)
  assert hidden == pytest.approx(10 / 50)
  state = outer_bytes(given)
  expected = NUMBERS * (2 * 4 + (3 * size + 4) / 4)
  assert state == pytest.approx(expected, rel=1e-6)


def test_palm_540b_sends_what_its_paper_says():
  """1.3 GB per host and step, of 768 hosts in each of two pods (PaLM 4)."""
  from_a_host = dcn_bytes(work(PALM_540B, pods=TWO_PODS)) / 2 / 768
  assert from_a_host / 2**30 == pytest.approx(1.31, abs=0.005)


# gin/models/palm_tiny.gin: 4,850,944 numbers, 4096 x 256 in the embedding.
TINY = dataclasses.replace(
  PALM_8B, num_layers=4, d_model=256, num_heads=4, d_kv=64, d_ff=1024
)
TINY = dataclasses.replace(TINY, vocab_size=4096, sequence_length=256)
EMBEDDING, OTHERS = 1_048_576, 3_802_368


def predicted(
  *, compute_secs=0.6, num_pods=2, dtype="float32", microbatches=1, **link
):
  mesh = dataclasses.replace(SINGLE, num_microbatches=microbatches)
  pods = PodsConfig(num_pods=num_pods, dcn_dtype=dtype)
  return step_secs(work(TINY, mesh, pods=pods), compute_secs, Link(**link))


def test_of_a_fast_link_only_the_embeddings_gradient_is_seen():
  """400 ms of the backward pass hide the other gradients' 12 ms."""
  secs = predicted(bits_per_sec=10e9)
  assert secs == pytest.approx(0.6 + 32 * EMBEDDING / 10e9)


def test_of_a_slow_link_the_last_backward_pass_hides_its_own_length():
  rest = 32 * OTHERS / 200e6 - 0.4
  assert rest > 0
  secs = predicted(bits_per_sec=200e6)
  assert secs == pytest.approx(0.6 + rest + 32 * EMBEDDING / 200e6)
  more = predicted(bits_per_sec=200e6, microbatches=4)
  assert more - secs == pytest.approx(0.3)


def test_bfloat16_halves_and_pods_multiply_what_crosses():
  one = predicted(bits_per_sec=1e9) - 0.6
  half = predicted(bits_per_sec=1e9, dtype="bfloat16") - 0.6
  assert half == pytest.approx(one / 2)
  assert predicted(bits_per_sec=3e9, num_pods=4) - 0.6 == pytest.approx(one)


def test_three_messages_wait_for_the_delay_and_no_limit_costs_nothing():
  assert predicted() == 0.6
  assert predicted(delay_secs=0.05) == pytest.approx(0.75)


def lowered_bytes(config, mesh, optimizer, batch_size, pods, frozen):
  """Returns the bytes that `traffic` finds in a step of all pods."""
  with tf.Graph().as_default():
    program = build_train_program(
      step_config(config, mesh, optimizer, pods=pods),
      batch_size=batch_size,
      seed=0,
      frozen=frozen,
    )
    last = program.update
    moved = traffic([*last.operations, *last.outputs.values()])
    for stream in program.plan.streams:
      for call in stream:
        moved += traffic(program.programs[call.nodes].operations)
  return moved


def case(
  layout,
  *,
  microbatches=1,
  gradient_dtype="activation",
  pods=1,
  second_moment="full",
  optimizer=PALM_OPTIMIZER,
  slow=False,
  frozen=(),
  **changes,
):
  mesh_shape, rules = LAYOUTS.get(layout, ("data:2,model:2", layout))
  mesh = MeshLayout(
    mesh_shape=mesh_shape,
    layout=rules,
    num_microbatches=microbatches,
    gradient_dtype=gradient_dtype,
  )
  if second_moment != "full":
    optimizer = dataclasses.replace(optimizer, second_moment=second_moment)
  return pytest.param(
    small_config(**changes)
    if "layers" in changes
    else small_config(num_layers=3 if frozen else 1, **changes),
    mesh,
    optimizer,
    PodsConfig(num_pods=pods),
    frozen,
    marks=pytest.mark.slow if slow else (),
  )


MULTI_HEAD, SERIAL = {"attention": "multi_head"}, {"block": "serial"}
BIASED = {
  "norm": "layer_norm_bias",
  "branch_norm": True,
  "biases": "o,mlp",
  **SERIAL,
}
TWO_D, NO_BATCH = "PaLM's 2D", "two axes but no batch"
BY_EXPERTS = "batch:data,experts:model,heads:model"
MOVED_2D, MOVED_1D = MOVED.layout, "batch:data,experts:data,heads:model"


# The lowest trained layer trains its norm, so it has its whole backward pass.
LOWEST = ("embedding", "layers/0/*", "layers/1/mlp/*")
ATTENTION = ("embedding", "layers/*/mlp/*", "final_norm/scale")


@pytest.mark.parametrize(
  ("config", "mesh", "optimizer", "pods", "frozen"),
  [
    case(TWO_D, microbatches=2, slow=True, remat="layer", frozen=LOWEST),
    case("all over data and model", pods=2, slow=True, frozen=LOWEST),
    case(
      "fully sharded", slow=True, frozen=ATTENTION, second_moment="factored"
    ),
    case("batch over data", frozen=("embedding", "layers/*")),
    case("batch over data"),
    case(
      TWO_D, slow=True, gradient_dtype="float32", activation_dtype="bfloat16"
    ),
    case(
      "all over data and model",
      microbatches=2,
      second_moment="factored",
      **MULTI_HEAD,
    ),
    case(NO_BATCH, slow=True, **MULTI_HEAD),
    # Some kernels are split along the shorter side, some along the longer.
    case(TWO_D, optimizer=MUON, activation_dtype="bfloat16"),
    case("fully sharded", optimizer=MUON, pods=2, slow=True),
    case(NO_BATCH, optimizer=ADAMW, slow=True),
    # A device has whole experts; or shares of all; pods exchange their counts.
    case(BY_EXPERTS, slow=True, **SETTINGS["Mixtral"]),
    case(BY_EXPERTS, pods=2, optimizer=MUON, slow=True, **SETTINGS["Mixtral"]),
    case(TWO_D, pods=2, optimizer=MUON, slow=True, **SETTINGS["DeepSeek-V3"]),
    case(NO_BATCH, slow=True, **SERIAL),
    case("padded vocab over three", slow=True),
    case("padded vocab over three", pods=2, slow=True),
    case(
      "fully sharded", microbatches=2, slow=True, activation_dtype="bfloat16"
    ),
    case(TWO_D, microbatches=2, slow=True, remat="layer"),
    case(TWO_D, slow=True, remat="layer", **SERIAL, **MULTI_HEAD),
    case(
      TWO_D,
      microbatches=2,
      second_moment="factored",
      slow=True,
      remat="attention",
      activation_dtype="bfloat16",
    ),
    case(TWO_D, microbatches=2, pods=2, slow=True, remat="attention"),
    case("batch over data", microbatches=2, pods=2, slow=True),
    case("batch:model,vocab:data,d_model_stored:model", remat="layer"),
    case("heads:model,vocab:data,d_model_residual:model", slow=True, **SERIAL),
    case(TWO_D, slow=True, remat="layer", **SETTINGS["Gemma 3"]),
    # REMAT adds the biases of a norm's input again, but not its own.
    case(TWO_D, remat="layer", slow=True, **BIASED),
    case("fully sharded", remat="layer", slow=True, **BIASED),
    *(
      case(layout, slow=True, **settings)
      for name, settings in SETTINGS.items()
      for layout in (TWO_D, "fully sharded", NO_BATCH)
    ),
    # Of experts, tokens move to those of other devices and back.
    case(MOVED_1D, remat="layer", **CAPACITY["GLaM"]),
    case(
      MOVED_1D, slow=True, remat="layer", microbatches=2, **CAPACITY["GLaM"]
    ),
    case(MOVED_2D, slow=True, pods=2, **SETTINGS["Mixtral"]),
    case(MOVED_2D, slow=True, remat="layer", **CAPACITY["Switch"]),
    # A norm reads the results of experts, so REMAT moves them back again.
    case(
      MOVED_2D,
      slow=True,
      remat="layer",
      branch_norm=True,
      second_moment="factored",
      **SETTINGS["OLMoE"],
    ),
  ],
)
def test_the_lowered_step_moves_the_bytes_of_the_closed_form(
  config, mesh, optimizer, pods, frozen
):
  n = pods.num_pods
  given = work(
    config, mesh, 8 // n, optimizer=optimizer, pods=pods, frozen=frozen
  )
  of_one_pod = step_bytes(given)
  expected = collections.Counter({k: n * v for k, v in of_one_pod.items()})
  actual = lowered_bytes(config, mesh, optimizer, 8, pods, frozen)
  if {"o", "mlp"} & {*config.bias_places} and not config.branch_norm:
    # The closed form leaves out how a split residual stream cuts the biases
    # that are added to it: a few messages of d_model numbers per layer.
    assert actual.keys() == expected.keys()
    for kind, moved in actual.items():
      error = abs(moved - expected[kind])
      assert error <= config.num_layers * 2 * 4 * 4 * config.d_model
    return
  assert actual == expected
  assert actual.total() > 0


def test_gradients_stored_split_move_half_on_their_way():
  """Weights are gathered twice: FSDP moves 3/2 of data parallelism's bytes."""
  config = small_config(vocab_size=16)
  whole, split = (
    step_bytes(work(config, MeshLayout(mesh_shape="data:4", layout=layout), 4))
    for layout in ("batch:data", "batch:data,d_model_stored:data")
  )
  ratio = split["reduce_scatter", ("data",)] / whole["all_reduce", ("data",)]
  # The margin is for the embedding's second gradient.
  assert ratio == pytest.approx(0.5, abs=0.03)
  assert split.total() / whole.total() == pytest.approx(1.5, abs=0.1)


V4, A100 = hardware_of("tpu_v4"), hardware_of("a100")


def mesh(shape, tpu=""):
  rules = {"data": "batch:data", "model": "heads:model"}
  layout = ",".join(rules[x.split(":")[0]] for x in shape.split(","))
  return MeshLayout(mesh_shape=shape, layout=layout, tpu=tpu)


@pytest.mark.parametrize(
  ("shape", "tpu", "of_model", "of_data"),
  [
    # 12 along x, a ring of 100 GB/s; 256 along the rings y and z.
    ("data:256,model:12", "v4-12x16x16", 100e9, 200e9),
    ("data:64,model:8", "v4-8x8x8", 100e9, 200e9),
    # Both axes lie along x, 4 of 8 chips: lines without the closing link.
    ("data:128,model:4", "v4-8x8x8", 50e9, 250e9),
    ("data:32,model:16", "v4-8x8x8", 150e9, 150e9),
    # No slice is named.
    ("data:256,model:12", "", 100e9, 200e9),
    ("data:64,model:64", "", 200e9, 100e9),
  ],
)
def test_an_axis_has_the_rings_and_lines_that_it_lies_along(
  shape, tpu, of_model, of_data
):
  layout = mesh(shape, tpu)
  for axes, expected in (
    (("model",), of_model),
    (("data",), of_data),
    (("data", "model"), 300e9),
  ):
    found = axes_bandwidth(layout, axes, V4, "all_gather")
    assert found == pytest.approx(expected)


def most_bytes_of_a_link(sizes, is_ring):
  """Returns the bytes over the busiest link if each chip sends one to each.

  Bytes go along one dimension after another, the shorter way around a ring; of
  two equally long ways, half of them go each way.
  """
  links = collections.Counter()
  chips = [*itertools.product(*map(range, sizes))]
  for source, target in itertools.product(chips, repeat=2):
    place = list(source)
    for dim, size in enumerate(sizes):
      distance = target[dim] - place[dim]
      ways = {1: distance, -1: -distance}
      if is_ring:
        ways = {way: x % size for way, x in ways.items()}
      ways = {way: x for way, x in ways.items() if x >= 0}
      shortest = [x for x in ways if ways[x] == min(ways.values())]
      for way, i in itertools.product(shortest, range(min(ways.values()))):
        at = place.copy()
        at[dim] = (at[dim] + i * way) % size
        links[dim, way, *at] += 1 / len(shortest)
      place[dim] = target[dim]
  return max(links.values())


@pytest.mark.parametrize(
  ("shape", "tpu", "axis", "sizes", "is_ring"),
  [
    ("data:64,model:16", "v4-16x8x8", "data", (8, 8), True),
    ("data:64,model:16", "v4-16x8x8", "model", (16,), True),
    ("data:32,model:4", "v4-8x4x4", "model", (4,), False),
    ("data:64", "v4-4x4x4", "data", (4, 4, 4), True),
  ],
)
def test_an_all_to_all_is_as_fast_as_its_busiest_link(
  shape, tpu, axis, sizes, is_ring
):
  rate = axes_bandwidth(mesh(shape, tpu), (axis,), V4, "all_to_all")
  sent_by_a_chip, of_link = math.prod(sizes) - 1, 300e9 / 6
  secs = most_bytes_of_a_link(sizes, is_ring) / of_link
  assert rate == pytest.approx(sent_by_a_chip / secs)


@pytest.mark.parametrize(
  ("shape", "axis", "bandwidth"),
  [
    ("data:8", "data", 300e9),  # one host
    ("data:4,model:8", "model", 300e9),
    ("data:4,model:8", "data", 25e9),  # one device per host
    ("data:8,model:4", "data", 50e9),  # two devices per host
    ("data:64", "data", 200e9),  # eight devices per host
    ("data:2,model:16", "model", 200e9),
  ],
)
def test_behind_switches_neighbours_share_the_network(shape, axis, bandwidth):
  found = axes_bandwidth(mesh(shape), (axis,), A100, "all_reduce")
  assert found == bandwidth


def test_behind_switches_an_all_to_all_has_a_network_link_per_device():
  for shape, bandwidth in (("data:8", 300e9), ("data:64", 25e9)):
    found = axes_bandwidth(mesh(shape), ("data",), A100, "all_to_all")
    assert found == bandwidth
