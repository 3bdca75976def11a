# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of a checkpoint that servers write do not pass through the client."""

import dataclasses

import pytest

from tools.bench import models


@pytest.mark.slow
def test_the_clients_memory_grows_with_the_model_only_where_it_writes(
  measure, monkeypatch
):
  whole = models.benchmark_config("float32")
  wide = dataclasses.replace(whole, d_model=1024, d_ff=4096)
  monkeypatch.setattr(models, "benchmark_config", lambda dtype: wide)
  small, small_client, large, large_client = measure(
    "checkpoint", "--servers=2", "--layers=1,3", "--rounds=2"
  )
  grown = {}
  for kind, less, more in (
    ("servers", small, large),
    ("client", small_client, large_client),
  ):
    assert less["by"] == more["by"] == kind
    grown[kind] = more["client_megabytes"] - less["client_megabytes"]
  model = large["megabytes"] - small["megabytes"]
  assert model > 200
  assert grown["client"] > 0.5 * model
  assert grown["servers"] < 0.1 * model
