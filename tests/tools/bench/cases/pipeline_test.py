# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Stages are compared with whole models, and keep what the forms say."""

import dataclasses

import pytest

from palm_mtf.config import MeshLayout
from tools.bench.cases import pipeline
from tools.bench.pairs import Turn


def test_efficiency_is_that_of_half_of_twice_the_work():
  secs = {"stages": [4, 2.5, 8], "apart": [4, 4, 8]}
  mesh = MeshLayout(mesh_shape="", layout="", stages=2, num_microbatches=4)
  record = pipeline.summarize(
    {kind: [Turn(x, 0.0, {}) for x in each] for kind, each in secs.items()},
    mesh,
  )
  assert record["efficiency"] == record["formula"] == 0.8
  assert record["ratio"] == 0.5
  assert (record["stages_secs"], record["apart_secs"]) == (2.5, 4)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["in_process", "local_servers"])
@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
def test_stages_keep_the_activations_of_the_closed_forms(
  measure, monkeypatch, order, place
):
  """Peak bytes in the queues of each stage, sampled after each pass."""
  whole = pipeline.small_head()
  small = dataclasses.replace(whole, num_layers=2, d_model=64, d_ff=128)
  monkeypatch.setattr(pipeline, "small_head", lambda: small)
  flags = [f"--orders={order}", f"--places={place}", "--microbatches=1,4"]
  records = measure("pipeline", *flags, "--rounds=1")
  assert [x["num_microbatches"] for x in records] == [1, 4]
  for record in records:
    assert record["kept_bytes"] == record["expected_bytes"]
  # Of four microbatches, GPipe keeps all; 1F1B keeps one for each stage from
  # this stage to the last, and one for the head.
  of_one, of_four = (x["kept_bytes"] for x in records)
  counts = [3, 2] if order == "1f1b" else [4, 4]
  assert of_four == [x * n for x, n in zip(of_one, counts, strict=True)]
