# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The choices of tools; docs_test.py has their flags. Nothing is measured."""

import re

import numpy as np
import pytest

from tests.doc_pages import Page
from tools.bench.models import SIZES
from tools.bench.peers import PEERS

PAGE = Page("docs/benchmarks.md")
COMMANDS = [
  words
  for block in PAGE.blocks
  if block.language == "sh"
  for words in block.commands
]


def _value_of(words, flag, default):
  return words[words.index(flag) + 1] if flag in words else default


@pytest.mark.parametrize("case", PEERS)
def test_every_size_and_peer_that_a_command_names_is_there(case):
  commands = [words for words in COMMANDS if case in words]
  assert commands
  for words in commands:
    assert _value_of(words, "--size", "26.6M") in SIZES
    assert {*_value_of(words, "--peer", "").split(",")} <= {*PEERS[case], ""}


def test_every_file_that_a_command_runs_is_python_of_ours_or_an_installation():
  for words in COMMANDS:
    programs = [x for x in words if not x.split("=")[0].isupper()]
    assert programs[0] in (".venv/bin/python", "pip")


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
