# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The tool builds a TPU's program whole, and refuses what has none."""

import json

import pytest

from tools import build_tpu

SMALL = ["NUM_LAYERS=1", "VOCAB_SIZE=512", "D_FF=64", "SEQUENCE_LENGTH=16"]


def flags(*macros):
  return [f"--gin.{macro}" for macro in (*SMALL, *macros)]


def run(monkeypatch, capsys, *arguments):
  monkeypatch.setattr("sys.argv", ["build_tpu.py", *arguments])
  return build_tpu.main(), capsys.readouterr()


def test_it_counts_the_collectives_of_two_pods(monkeypatch, capsys):
  code, shown = run(
    monkeypatch,
    capsys,
    "--gin_file=recipes/quickstart.gin",
    "--gin_file=layouts/tpu_v4_8.gin",
    *flags("NUM_PODS=2"),
  )
  assert code == 0
  found = json.loads(shown.out)
  assert (found["tpu"], found["devices"], found["pods"]) == ("v4-8", 4, 2)
  # Of each of 10 gradients, of each pod, and again of the embedding's other
  # use; those of norm scales are cut for the exchange.
  assert found["XlaReduceScatter"] >= 2 * 10


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--gin_file=recipes/quickstart.gin"], "TPU is not set"),
    (["--layers=3"], "--layers=3: no such flag"),
  ],
)
def test_what_it_cannot_build_is_one_line(
  monkeypatch, capsys, arguments, message
):
  code, shown = run(monkeypatch, capsys, *arguments)
  assert code == 2
  assert shown.err.startswith(f"build_tpu: {message}")
  assert shown.err.count("\n") == 1
