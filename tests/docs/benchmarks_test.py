# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The choices of tools; docs_test.py has their flags. Nothing is measured."""

import re

import numpy as np

from tests.doc_pages import Page

PAGE = Page("docs/benchmarks.md")


def test_the_sentences_on_cost_against_work_follow_from_the_table():
  (block,) = (x for x in PAGE.blocks if x.text.startswith("batch  "))
  rows = re.findall(r"^(\w+) +(\S+) +([\d.]+)", block.text, re.M)
  batch, layers = (
    {int(x): float(value) for of, x, value in rows if of == kind}
    for kind in ("batch", "layers")
  )
  data, checkpoint = (
    [float(value) for of, _, value in rows if of == kind]
    for kind in ("data", "checkpoint")
  )
  assert all(abs(batch[x] - 1) < 0.06 for x in batch if x >= 4)
  slope, height = np.polyfit([*layers], [*layers.values()], 1)
  off = max(abs(y / (height + slope * x) - 1) for x, y in layers.items())
  said = f"at most {off:.1%} off {height:.3f} + {slope:.4f} layers"
  assert block.text.endswith(f"layers: {said}\n")
  assert max(data) < 0.001 and max(checkpoint) < 0.1
