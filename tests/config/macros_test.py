# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A field is the macro of its name in capitals, whichever part it lies in."""

import dataclasses

from palm_mtf.config.macros import MISSING, from_macros, macros_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
  depth: int
  seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  seed: int
  steps: int = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  size: Size
  run: Run = dataclasses.field(default_factory=lambda: Run(seed=7))


def test_macros_come_in_the_order_of_the_fields_with_their_defaults():
  macros = macros_of(Job)
  assert list(macros) == ["DEPTH", "SEED", "STEPS"]
  assert macros == {"DEPTH": MISSING, "SEED": MISSING, "STEPS": 3}


def test_a_macro_that_two_parts_read_reaches_both():
  job = from_macros(Job, {"DEPTH": 2, "SEED": 5, "STEPS": 4})
  assert job == Job(size=Size(depth=2, seed=5), run=Run(seed=5, steps=4))


def test_a_field_whose_macro_has_no_value_keeps_its_default():
  job = from_macros(Job, {"DEPTH": 2, "SEED": 5})
  assert job.run == Run(seed=5, steps=3)
