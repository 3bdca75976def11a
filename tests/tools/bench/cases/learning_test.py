# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of losses, the GPT's size, and real turns of palm_mtf."""

import math

import pytest

from tools.bench.cases import learning


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


@pytest.mark.slow
def test_ours_learns_in_its_turns(measure):
  (record,) = measure("learning", "--minutes=1", "--gin.EVAL_BATCHES=1")
  losses = [x["loss"] for x in record["ours"]]
  assert len(losses) == 6 and losses[-1] < losses[0]
