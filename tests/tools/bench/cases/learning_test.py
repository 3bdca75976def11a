# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of losses, the GPT's size, and real turns of palm_mtf."""

import math

import pytest

from tools.bench.cases import learning
from tools.bench.command import train_config


def curve(*losses):
  return [
    {"processor_secs": 10.0 * (i + 1), "loss": x * math.log(2), "step": 7}
    for i, x in enumerate(losses)
  ]


def test_the_table_has_bits_a_byte_and_the_time_to_the_best_peer_s_loss():
  records = {
    "ours": curve(9, 6, 4),
    "GPT 0.001": curve(9, 9, 8),
    "GPT 0.002": curve(9, 8, 6),
  }
  *_, third, steps, last = learning.lines(records, bytes_per_token=2.0)
  assert third.split() == ["30", "2.0000", "4.0000", "3.0000"]
  assert steps.split() == ["steps", "7", "7", "7"]
  assert last == "30 s of GPT 0.002: 20 s of ours"


def test_a_loss_that_ours_does_not_reach_is_said():
  records = {"ours": curve(9, 7), "GPT 0.001": curve(8, 6)}
  assert learning.lines(records, 1.0)[-1].endswith("not reached by ours")


def test_the_gpt_has_as_many_parameters_as_the_quickstart():
  config = train_config(["recipes/quickstart.gin"], [])
  assert learning.choose_gpt_width(config) == 136
  # GPT-2's count: 4 layers of 12 d^2 + 13 d, the last norm, both tables.
  d = 136
  count = 4 * (12 * d * d + 13 * d) + 2 * d + (4096 + 128) * d
  assert count == pytest.approx(1_475_200, rel=0.03)


@pytest.mark.slow
def test_ours_learns_in_its_turns(measure):
  (record,) = measure("learning", "--minutes=1", "--gin.EVAL_BATCHES=1")
  losses = [x["loss"] for x in record["ours"]]
  assert len(losses) == 6 and losses[-1] < losses[0]
