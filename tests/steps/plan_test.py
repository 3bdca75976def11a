# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The order of passes ends, takes the formula's time, and keeps its numbers."""

import collections
import dataclasses
import itertools

import pytest

from palm_mtf.accounting.step_time import bubble, pipeline_secs
from palm_mtf.config import ExchangeConfig, PodsConfig
from palm_mtf.steps.plan import (
  BACKWARD,
  FORWARD,
  HEAD,
  AllSum,
  Send,
  num_kept,
  plan_losses,
  plan_step,
  stage_layers,
)
from tests.mtf_testing import SINGLE

STAGES, MICROBATCHES = range(2, 9), (1, 2, 3, 5, 8, 16)
ORDERS = ("1f1b", "gpipe")
KINDS = FORWARD, BACKWARD, HEAD
EVERY = list(itertools.product(STAGES, MICROBATCHES, ORDERS))


def in_stages(num_stages, num_microbatches, order):
  counts = {"stages": num_stages, "num_microbatches": num_microbatches}
  return dataclasses.replace(SINGLE, stage_order=order, **counts)


def stage_passes(mesh, first_backward=0):
  """Returns [(phase, microbatch)] of each stage and of the head."""
  plan = plan_step(mesh, PodsConfig(), first_backward=first_backward)
  return [
    [(plan.nodes_of(call)[0].phase, call.microbatch) for call in stream]
    for stream in plan.streams
  ]


def simulate(num_stages, num_microbatches, order, secs, first_backward=0):
  """Returns the time at which the last pass ends; fails if no pass can begin.

  `secs` are the seconds of each of KINDS. The head takes no stage's time,
  except that the last stage waits for it.
  """
  kind_secs = dict(zip(KINDS, secs, strict=True))
  mesh = in_stages(num_stages, num_microbatches, order)
  todo = stage_passes(mesh, first_backward)
  free, ended = [0.0] * len(todo), {}
  while any(todo):
    before = len(ended)
    for stage, passes in enumerate(todo):
      while passes:
        kind, i = passes[0]
        needs = {
          FORWARD: (FORWARD, i, stage - 1) if stage else None,
          HEAD: (FORWARD, i, num_stages - 1),
          BACKWARD: (BACKWARD, i, stage + 1)
          if stage < num_stages - 1
          else (HEAD, i, num_stages),
        }[kind]
        if needs and needs not in ended:
          break
        start = max(free[stage], ended[needs] if needs else 0.0)
        free[stage] = ended[kind, i, stage] = start + kind_secs[kind]
        del passes[0]
    assert len(ended) > before, f"deadlock: {todo}"
  return max(free)


@pytest.mark.parametrize("order", ORDERS)
def test_every_stage_makes_every_pass_once_in_the_order_of_microbatches(order):
  """Sums over microbatches are added in the order of a run without stages."""
  for num_stages, num_microbatches in itertools.product(STAGES, MICROBATCHES):
    stages = stage_passes(in_stages(num_stages, num_microbatches, order))
    kinds = [(FORWARD, BACKWARD)] * num_stages + [(HEAD,)]
    for of_stage, passes in zip(kinds, stages, strict=True):
      assert {kind for kind, _ in passes} == {*of_stage}
      for kind in of_stage:
        of_kind = [i for x, i in passes if x == kind]
        assert of_kind == list(range(num_microbatches))


@pytest.mark.parametrize("order", ORDERS)
def test_a_step_takes_m_plus_s_minus_one_microbatches(order):
  for num_stages, num_microbatches in itertools.product(STAGES, MICROBATCHES):
    secs = simulate(num_stages, num_microbatches, order, (1, 2, 0))
    assert secs == 3 * (num_microbatches + num_stages - 1)
    busy = 3 * num_microbatches
    mesh = in_stages(num_stages, num_microbatches, order)
    assert 1 - busy / secs == pytest.approx(bubble(mesh))
    assert pipeline_secs([busy] * num_stages, num_microbatches) == secs


@pytest.mark.parametrize("order", ORDERS)
def test_a_step_waits_at_most_once_for_a_fast_head(order):
  for num_stages, num_microbatches in itertools.product(STAGES, MICROBATCHES):
    given = num_stages, num_microbatches, order
    assert simulate(*given, (1, 2, 1)) <= simulate(*given, (1, 2, 0)) + 1


@pytest.mark.parametrize("order", ORDERS)
def test_stages_of_any_speed_come_to_an_end(order):
  for num_stages, num_microbatches in itertools.product(STAGES, MICROBATCHES):
    for secs in itertools.product((0, 1, 5), repeat=3):
      for begin in {0, 1, num_stages}:
        simulate(num_stages, num_microbatches, order, secs, begin)


@pytest.mark.parametrize(("num_stages", "num_microbatches", "order"), EVERY)
@pytest.mark.parametrize("begin", [0, 1])
def test_on_accelerators_stage_0_runs_the_head_in_an_order_that_ends(
  num_stages, num_microbatches, order, begin
):
  """Its hosts run all programs in one order, and its own passes keep theirs."""
  mesh = in_stages(num_stages, num_microbatches, order)
  given = mesh, PodsConfig(num_pods=1)
  first, *others = plan_step(*given, first_backward=begin).streams
  plan = plan_step(*given, first_backward=begin, on_accelerators=True)
  merged, *same = plan.streams
  head = others.pop()
  assert same == others
  assert [x for x in merged if x not in head] == [*first]
  assert [x for x in merged if x in head] == [*head]
  sources = {x.target: x.source for x in plan.edges if isinstance(x, Send)}
  ended, left = set(), [[*x] for x in plan.streams]
  while any(left):
    before = len(ended)
    for calls in left:
      while calls:
        (name,), microbatch = calls[0]
        if name in sources and (sources[name], microbatch) not in ended:
          break
        ended.add((name, microbatch))
        del calls[0]
    assert len(ended) > before, f"deadlock: {left}"


@pytest.mark.parametrize(("num_stages", "num_microbatches", "order"), EVERY)
def test_gpipe_keeps_all_microbatches_and_1f1b_one_per_later_stage(
  num_stages, num_microbatches, order
):
  """Huang et al. (2019), section 2.3; Narayanan et al. (2021), section 2.2.

  The head is a stage, too.
  """
  mesh = in_stages(num_stages, num_microbatches, order)
  for stage, passes in enumerate(stage_passes(mesh)[:num_stages]):
    changes = {FORWARD: 1, BACKWARD: -1}
    kept = itertools.accumulate(changes.get(kind, 0) for kind, _ in passes)
    expected = num_microbatches
    if order == "1f1b":
      expected = min(num_stages + 1 - stage, num_microbatches)
    assert max(kept) == expected
    assert num_kept(stage, mesh) == expected


def test_stages_hold_equal_shares_of_the_layers_in_their_order():
  assert [[*x] for x in stage_layers(6, 3)] == [[0, 1], [2, 3], [4, 5]]


MESHES = [
  *(in_stages(x, y, "1f1b") for x in (1, 2, 3) for y in (1, 2, 4)),
  in_stages(2, 3, "gpipe"),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("num_pods", [1, 2, 3])
@pytest.mark.parametrize("begin", [0, 1, 2])
def test_every_node_runs_once_for_each_microbatch(mesh, num_pods, begin):
  pods = PodsConfig(num_pods=num_pods)
  plan = plan_step(mesh, pods, first_backward=begin)
  calls = [*itertools.chain(*plan.streams), plan.last]
  ran = collections.Counter(x for call in calls for x in call.nodes)
  assert ran == {x.name: x.repeats for x in plan.nodes}
  microbatches = collections.defaultdict(set)
  for call in calls:
    for name in call.nodes:
      microbatches[name].add(call.microbatch)
  for node in plan.nodes:
    if node.repeats > 1:
      assert microbatches[node.name] == set(range(mesh.num_microbatches))


def test_a_model_of_one_pod_is_one_call_a_step():
  """Every further call costs the time of a round trip."""
  plan = plan_step(SINGLE, PodsConfig())
  assert not any(plan.streams)
  assert plan.last.nodes == ("gradients[0]", "update[0]")


def test_the_last_microbatch_is_in_the_call_of_the_update():
  """So gradients leave for other pods during the backward pass."""
  plan = plan_step(in_stages(1, 3, "1f1b"), PodsConfig(num_pods=2))
  names = "gradients[0]", "gradients[1]", "update[0]", "update[1]"
  assert plan.last.nodes == names
  assert plan.last.microbatch == 2
  assert [len(x) for x in plan.streams] == [2, 2]


def test_accelerators_compute_all_microbatches_in_one_call():
  mesh = in_stages(1, 4, "1f1b")
  plan = plan_step(mesh, PodsConfig(num_pods=2), on_accelerators=True)
  assert not plan.streams
  assert [x.repeats for x in plan.nodes] == [4, 4, 1, 1]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_pods_sum_every_gradient_and_send_nothing_else(mesh):
  plan = plan_step(mesh, PodsConfig(num_pods=3, dcn_dtype="bfloat16"))
  (each,) = (x for x in plan.edges if isinstance(x, AllSum))
  writers = {x.name for x in plan.nodes if "sums" in x.writes}
  assert {*each.sources} == writers
  assert each.targets == ("update[0]", "update[1]", "update[2]")
  assert each.dtype == "bfloat16"
  pods = {x.name: x.pod for x in plan.nodes}
  sends = [x for x in plan.edges if isinstance(x, Send)]
  assert all(pods[x.source] == pods[x.target] for x in sends)
  assert plan.has_pipeline == (mesh.stages > 1)


def test_a_microbatch_goes_from_stage_to_stage_and_back():
  edges = plan_step(in_stages(2, 1, "1f1b"), PodsConfig()).edges
  assert [(x.source, x.target) for x in edges] == [
    ("forward[0, 0]", "forward[0, 1]"),
    ("forward[0, 1]", "head[0]"),
    ("head[0]", "backward[0, 1]"),
    ("backward[0, 1]", "backward[0, 0]"),
  ]


@pytest.mark.parametrize(
  ("begin", "backward"),
  [
    (1, ["head[0]", "backward[0, 2]", "backward[0, 1]"]),
    (2, ["head[0]", "backward[0, 2]"]),
    (3, ["head[0]"]),
  ],
)
def test_nothing_is_sent_back_to_stages_before_all_that_is_trained(
  begin, backward
):
  mesh = in_stages(3, 4, "1f1b")
  plan = plan_step(mesh, PodsConfig(num_pods=2), first_backward=begin)
  sends = [x for x in plan.edges if isinstance(x, Send)]
  forward = ["forward[0, 0]", "forward[0, 1]", "forward[0, 2]"]
  assert [(x.source, x.target) for x in sends if "[0" in x.source] == [
    *itertools.pairwise([*forward, *backward])
  ]
  (each,) = (x for x in plan.edges if isinstance(x, AllSum))
  assert {x for x in each.sources if "[0" in x} == {*backward}
  keeping = {x.name for x in plan.nodes if "activations" in x.writes}
  assert {x for x in keeping if "[0" in x} == {*forward[begin:]}


def test_a_loss_needs_no_backward_pass_and_no_other_pod():
  plan = plan_losses(in_stages(2, 3, "1f1b"), 2, 3)
  assert plan.last is None
  assert len(plan.streams) == 2 * 3  # two stages and the head
  assert all(isinstance(x, Send) for x in plan.edges)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("on_accelerators", [False, True])
def test_only_syncs_cross_pods_that_exchange_parameters(
  num_stages, on_accelerators
):
  """No stream has nodes of two pods; each pod's own update ends its stream."""
  mesh = in_stages(num_stages, 2, "1f1b")
  syncs = {"outer_steps": 12, "fragments": 3, "outer_dtype": "e3m0"}
  diloco = ExchangeConfig(exchange="diloco", **syncs)
  given = mesh, PodsConfig(num_pods=2)
  plan = plan_step(*given, diloco, on_accelerators=on_accelerators)
  pods = [{y.pod for x in s for y in plan.nodes_of(x)} for s in plan.streams]
  assert all(len(x) == 1 for x in pods)
  ends = [s[-1].nodes[-1] for s in plan.streams]
  updates = [x for x in ends if x.startswith("update")]
  assert updates == ["update[0]", "update[1]"]
  sums = [x for x in plan.edges if isinstance(x, AllSum)]
  names = ("update[0]", "update[1]"), ("outer[0]", "outer[1]")
  assert sums == [AllSum(*names, "e3m0", every=4)]
  assert plan.last.nodes == ("outer[0]", "outer[1]")
  assert {x.every for x in plan.nodes_of(plan.last)} == {4}
  exchanging = plan_step(*given, on_accelerators=on_accelerators).edges
  sends, others = (
    {(x.source, x.target) for x in edges if isinstance(x, Send)}
    for edges in (plan.edges, exchanging)
  )
  assert sends == others
