# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What-if curves go where theory says, and hold the plan at its own value."""

import itertools

import pytest

from palm_mtf.accounting.curves import curves
from palm_mtf.accounting.step_time import predicted
from tests.planning import palm_540b, plan_config

PALM = palm_540b()
CURVES = curves(PALM)


@pytest.mark.parametrize(
  ("macro", "value"),
  [
    ("CHIP_DCN_BANDWIDTH", 1.648e9),
    ("NUM_PODS", 2),
    ("GLOBAL_BATCH_SIZE", 2048),
    ("SEQUENCE_LENGTH", 2048),
  ],
)
def test_at_its_own_value_a_curve_is_the_plan(macro, value):
  (point,) = [x for x in CURVES[macro] if x["value"] == value]
  assert point["step_secs"] == predicted(PALM, 2048).total
  assert point["batch_size"] == 2048


def values(macro, name):
  return [point[name] for point in CURVES[macro]]


def test_of_a_faster_network_only_the_exchange_gets_shorter():
  networks = values("CHIP_DCN_BANDWIDTH", "value")
  secs = values("CHIP_DCN_BANDWIDTH", "step_secs")
  one_pod, *_ = values("NUM_PODS", "step_secs")
  exchanged = [(x - one_pod) * y for x, y in zip(secs, networks, strict=True)]
  # 2 bytes per parameter, in equal parts of 3,072 devices. The collectives of
  # one pod alone take 0.1 ms less.
  assert exchanged == pytest.approx([2 * 540.356e9 / 3072] * 10, rel=4e-3)


def test_pods_scale_weakly():
  """Each with 1,024 sequences: pods add work, and the time of the exchange."""
  assert values("NUM_PODS", "batch_size") == [1024 * n for n in range(1, 9)]
  secs = values("NUM_PODS", "step_secs")
  assert secs[0] < secs[1] < 1.03 * secs[0]


def test_a_larger_batch_uses_the_chips_better():
  """Gathered weights serve more tokens."""
  mfu = values("GLOBAL_BATCH_SIZE", "mfu")
  assert all(a < b for a, b in itertools.pairwise(mfu))
  assert values("GLOBAL_BATCH_SIZE", "value")[0] == 512  # 256 rows a pod


def test_a_longer_context_costs_attention_at_the_same_tokens():
  lengths = values("SEQUENCE_LENGTH", "value")
  rows = values("SEQUENCE_LENGTH", "batch_size")
  assert {a * b for a, b in zip(lengths, rows, strict=True)} == {2048 * 2048}
  tokens = values("SEQUENCE_LENGTH", "tokens_per_sec")
  assert all(a > b for a, b in itertools.pairwise(tokens))


def test_one_pod_has_no_curve_of_the_network():
  one = plan_config("recipes/palm_8b.gin", CHIP="tpu_v3", GLOBAL_BATCH_SIZE=64)
  assert set(curves(one)) == {"GLOBAL_BATCH_SIZE", "SEQUENCE_LENGTH"}
