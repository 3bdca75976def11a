# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The exchange is compared with the same pods without an exchange."""

import dataclasses

import pytest

from tools.bench.cases import pods


@pytest.mark.slow
def test_two_servers_train_joined_apart_and_single(measure, monkeypatch):
  whole = pods.benchmark_config("bfloat16")
  small = dataclasses.replace(whole, num_layers=1, d_model=32, d_ff=64)
  monkeypatch.setattr(pods, "benchmark_config", lambda dtype: small)
  records = measure("pods", "--microbatches=1,2", "--rounds=1")
  assert [record["num_microbatches"] for record in records] == [1, 2]
  for record in records:
    assert record["dcn_dtype"] == "bfloat16"
    assert record["ratio"] * record["joined_secs"] == pytest.approx(
      record["apart_secs"], rel=0.05
    )
    assert min(record[f"{kind}_secs"] for kind in ("joined", "single")) > 0
