# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which runs a law is fitted to, and what is said of it."""

import re

import pytest

from palm_mtf.sweep.law_report import (
  law_record,
  law_text,
  runs_to_fit,
  why_no_law,
)
from tests.sweep.laws import chinchilla_loss, runs

BUDGET = 6e22


def row(name, parameters, tokens, loss, **columns):
  return {
    "run": name,
    "parameters": parameters,
    "tokens": tokens,
    "flops": 6 * parameters * tokens,
    "flops_per_token": 6 * parameters,
    "loss": loss,
    "outcome": "finished",
    "held_out": False,
    **columns,
  }


@pytest.fixture(scope="module")
def rows():
  fitted = [row("fitted", *run) for run in zip(*runs(), strict=True)]
  loss = chinchilla_loss(1e10, 1e12)
  return [*fitted, row("new", 1e10, 1e12, loss, held_out=True)]


def test_the_law_is_of_the_best_finished_run_of_each_size_and_tokens():
  best = row("b", 10, 20, 2.5)
  given = [
    row("a", 10, 20, 3.0),
    best,
    row("c", 10, 20, 2.0, outcome="stopped early"),
    row("d", 10, 20, 2.0, held_out=True),
    row("e", 10, 0, None, outcome="not finished"),
    row("f", 10, 20, None),  # its last loss was not finite
  ]
  assert runs_to_fit(given) == [best]


def test_one_size_makes_no_law_and_the_reason_is_told(rows):
  assert why_no_law(rows) == ""
  size = rows[0]["parameters"]
  said = why_no_law([x for x in rows if x["parameters"] == size])
  assert said.endswith("there are 4, of 1 and 4")


def test_the_record_has_the_optimum_and_the_run_that_was_held_out(rows):
  record = law_record(rows, BUDGET)
  assert record["num_runs"] == 20
  assert record["alpha"].value == pytest.approx(0.34, rel=1e-3)
  budget = record["budget"]
  flops = 6 * budget["parameters"].value * budget["tokens"].value
  assert flops == pytest.approx(BUDGET, rel=1e-3)
  largest = max(x["flops"] for x in rows[:-1])
  assert budget["times_the_largest_run"] == pytest.approx(BUDGET / largest)
  (check,) = record["held_out"]
  assert check["predicted"].value == pytest.approx(check["measured"], rel=1e-3)
  # L(C) = E + K / C^gamma, along the line of the picture.
  e, gamma = record["E"].value, record["gamma"].value
  first, last = (record["frontier"][i] for i in (0, -1))
  assert last["flops"] == pytest.approx(BUDGET)
  fall = (first["loss"].value - e) / (last["loss"].value - e)
  assert fall == pytest.approx((last["flops"] / first["flops"]) ** gamma)


def test_people_read_the_law_its_optimum_and_its_check(rows):
  text = law_text(law_record(rows, BUDGET))
  assert "scaling law of 20 runs" in text
  assert re.search(r"^  alpha +0\.34 +0\.34 to 0\.34$", text, re.MULTILINE)
  assert "compute-optimal for 6e+22 FLOPs" in text
  assert text.splitlines()[-1].startswith("  new  ")
  assert "compute-optimal" not in law_text(law_record(rows, None))
