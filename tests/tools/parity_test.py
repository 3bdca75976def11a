# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The curve equals an independent program's; differences are reported."""

import json
import math

import numpy as np
import pytest

from tools import parity

SMALL = ["--d_model=64", "--d_kv=16", "--d_ff=256", "--sequence_length=64"]


@pytest.mark.slow
def test_two_hundred_steps_follow_an_independent_program(capsys):
  assert parity.main([*SMALL, "--steps=200"]) == 0
  record = json.loads(capsys.readouterr().out)
  assert record["steps"] == 200
  assert record["first_difference"] <= 1e-5
  assert record["largest_difference"] <= 1e-3
  assert record["last_loss"] < record["first_loss"] - 2, "it learnt"


def test_a_curve_that_differs_is_told_from_one_that_agrees():
  ours = np.linspace(5.0, 2.0, 50)
  assert parity.compare(ours, ours)["agrees"]
  assert parity.compare(ours * (1 + 9e-6), ours)["agrees"]
  assert not parity.compare(ours * (1 + 2e-5), ours)["agrees"]
  late = ours * np.where(np.arange(50) < 10, 1, 1 + 9e-4)
  assert parity.compare(late, ours)["agrees"]
  later = ours * np.where(np.arange(50) < 49, 1, 1 + 2e-3)
  record = parity.compare(later, ours)
  assert not record["agrees"]
  assert record["largest_difference"] == 2e-3
  assert record["first_difference"] == 0
  for bad in (math.nan, math.inf):
    assert not parity.compare([3.0, bad], [3.0, 2.0])["agrees"]
    assert not parity.compare([3.0, 2.0], [3.0, bad])["agrees"]
