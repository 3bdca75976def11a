# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The order of passes ends, takes the formula's time, and keeps its numbers."""

import dataclasses
import itertools

import pytest

from palm_mtf.accounting.pipeline import (
  BACKWARD,
  FORWARD,
  HEAD,
  bubble,
  num_kept,
  pipeline_secs,
  stage_layers,
  stage_passes,
)
from tests.mtf_testing import SINGLE, small_config

STAGES, MICROBATCHES, ORDERS = (
  range(2, 9),
  (1, 2, 3, 5, 8, 16),
  ("1f1b", "gpipe"),
)
KINDS = FORWARD, BACKWARD, HEAD
EVERY = list(itertools.product(STAGES, MICROBATCHES, ORDERS))


def in_stages(num_stages, num_microbatches, order):
  return dataclasses.replace(
    SINGLE,
    stages=num_stages,
    num_microbatches=num_microbatches,
    stage_order=order,
  )


def simulate(num_stages, num_microbatches, order, secs):
  """Returns the time at which the last pass ends; fails if no pass can begin.

  `secs` are the seconds of each of KINDS. The head takes no stage's time,
  except that the last stage waits for it.
  """
  kind_secs = dict(zip(KINDS, secs, strict=True))
  todo = stage_passes(in_stages(num_stages, num_microbatches, order))
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
    times = [
      simulate(num_stages, num_microbatches, order, x)
      for x in ((1, 2, 0), (1, 2, 1))
    ]
    assert times[1] <= times[0] + 1


@pytest.mark.parametrize("order", ORDERS)
def test_stages_of_any_speed_come_to_an_end(order):
  for num_stages, num_microbatches in itertools.product(STAGES, MICROBATCHES):
    for secs in itertools.product((0, 1, 5), repeat=3):
      simulate(num_stages, num_microbatches, order, secs)


@pytest.mark.parametrize(("num_stages", "num_microbatches", "order"), EVERY)
def test_gpipe_keeps_all_microbatches_and_1f1b_one_per_later_stage(
  num_stages, num_microbatches, order
):
  """Huang et al. (2019), section 2.3; Narayanan et al. (2021), section 2.2.

  The head is a stage, too.
  """
  mesh = in_stages(num_stages, num_microbatches, order)
  for stage, passes in enumerate(stage_passes(mesh)[:num_stages]):
    kept = itertools.accumulate(
      {FORWARD: 1, BACKWARD: -1}.get(kind, 0) for kind, _ in passes
    )
    expected = min(num_stages + 1 - stage, num_microbatches)
    if order == "gpipe":
      expected = num_microbatches
    assert max(kept) == expected
    assert num_kept(stage, mesh) == expected


def test_stages_hold_equal_shares_of_the_layers_in_their_order():
  config = small_config(num_layers=6)
  assert [[*x] for x in stage_layers(config, 3)] == [[0, 1], [2, 3], [4, 5]]
